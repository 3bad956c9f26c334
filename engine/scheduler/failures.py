"""Handles chunks and pictures that failed."""

from __future__ import annotations

from engine.plan import StepResult
from engine.scheduler.memory import Memory
from engine.scheduler.planning.plan_builder import InFlightStep
from engine.scheduler.planning.prefilling import Prefilling
from engine.scheduler.pools.snapshot_pool import Snapshot
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


def discard_failed(
    failed: set[Sequence], step: InFlightStep, later: InFlightStep | None, memory: Memory
) -> set[Sequence]:
    """Forget the names and snapshots that ``failed`` sequences got in ``step``.

    They could be found since ``step`` was planned. ``later``, the plan after it, may therefore have
    let others share their pages, and named more on top: these names are forgotten too. Returns the
    other sequences that have wrong KV in this way; they must start again.
    """
    bad_names: set[bytes] = set()
    bad_snapshots: set[Snapshot] = set()
    for seq in failed:
        bad_names.update(step.named.pop(seq, ()))
        bad_names.update(later.named.pop(seq, ()) if later else ())
        for content in step.filled.pop(seq, ()):
            memory.forget_stored(content)
        for snapshot in step.saved.pop(seq, ()):
            if memory.withdraw(snapshot):
                memory.settle(snapshot)
            bad_snapshots.add(snapshot)
    innocent: set[Sequence] = set()
    if later is not None:
        shared = {seq for seq, hashes in later.shared.items() if not bad_names.isdisjoint(hashes)}
        restored = {s for s, found in later.restored.items() if not bad_snapshots.isdisjoint(found)}
        innocent = (shared | restored) - failed
        later.discarded |= failed | innocent
        for seq in later.discarded:
            bad_names.update(later.named.pop(seq, ()))
            for content in later.filled.pop(seq, ()):
                memory.forget_stored(content)
            for snapshot in later.saved.pop(seq, ()):
                if memory.withdraw(snapshot):
                    later.invalid.append(snapshot)
    for block_hash in bad_names:
        memory.withdraw_name(block_hash)
    return innocent
