"""Handles chunks and pictures that failed."""

from __future__ import annotations

from engine.plan import StepResult
from engine.scheduler.memory import Memory
from engine.scheduler.planning.plan_builder import InFlightStep
from engine.scheduler.planning.prefilling import Prefilling
from engine.scheduler.pools.block_pool import Block
from engine.scheduler.sequences.sequence import Sequence, Status
from engine.scheduler.sequences.sequence_table import SequenceTable


def without_pictures(
    result: StepResult, sequences: SequenceTable, prefilling: Prefilling
) -> dict[Sequence, str]:
    """Drop the pictures that could not be encoded. Return the sequences that still need one of
    them, and why they fail. Their passes are dropped: no chunk in them has raised."""
    found: dict[Sequence, str] = {}
    for digest, reason in result.failed_pictures:
        prefilling.pictures.drop(digest)
        for seq in sequences.ordered(Status.PREFILLING):
            ahead = (one for one in seq.pictures if one.end > seq.num_computed_tokens)
            if any(one.digest == digest for one in ahead):
                found[seq] = f"a picture cannot be encoded: {reason}"
                prefilling.passes.drop(seq)
    return found


def discard_failed_saves(
    failed: set[Sequence], step: InFlightStep, later: InFlightStep | None, memory: Memory
) -> set[Sequence]:
    """Remove the blocks that ``failed`` sequences were to save in ``step`` from the pool.

    These blocks could be found since ``step`` was planned. ``later``, the plan after it, may
    therefore have restored them and saved more on top: these blocks are removed too. Returns the
    other sequences that got wrong KV into their slots in this way; they must start again.
    """
    bad: set[Block] = set()
    for seq in failed:
        for block in step.saved.pop(seq, ()):
            if memory.withdraw(block):
                memory.settle(block)
            bad.add(block)
    if later is None:
        return set()
    innocent = {seq for seq, blocks in later.restored.items() if not bad.isdisjoint(blocks)}
    later.discarded |= failed | innocent
    for seq in later.discarded:
        for block in later.saved.pop(seq, ()):
            if memory.withdraw(block):
                later.invalid_blocks.append(block)
    return innocent - failed
