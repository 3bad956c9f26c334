"""Invariants that hold between any two calls. Checking them visits every structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.memory import Memory
from engine.scheduler.planning.plan_builder import InFlightStep
from engine.scheduler.sequences.sequence import HOLDING_SLOT, Status
from engine.scheduler.sequences.sequence_table import SequenceTable


class IntegrityError(AssertionError):
    """The scheduler's structures contradict each other."""


def check(
    config: SchedulerConfig, sequences: SequenceTable, memory: Memory, steps: Iterable[InFlightStep]
) -> None:
    """Check all invariants, with ``steps`` in flight; slow, for tests and idle times.

    Raises: `IntegrityError`, which names everything that is wrong.
    """
    faults = [*_memory(config, memory, list(steps)), *_slots(config, sequences, memory)]
    if faults:
        raise IntegrityError("; ".join(faults))


def _memory(config: SchedulerConfig, memory: Memory, steps: list[InFlightStep]) -> Iterator[str]:
    yield from memory.blocks.faults()
    yield from memory.snapshots.faults()
    charged = config.beside_bytes
    charged += sum(config.slab_bytes(slab.rows, slab.capacity) for slab in memory.slots.slabs())
    charged += len(memory.blocks) * config.block_bytes
    charged += len(memory.snapshots) * config.state_bytes
    charged += sum(memory.fetch_reservations.values()) * config.block_bytes
    charged += memory.pass_bytes
    invalid_blocks = [block for step in steps for block in step.invalid_blocks]
    invalid_bytes = sum(map(memory.bytes_of, invalid_blocks))
    charged += invalid_bytes
    if len(memory.snapshots) > config.max_snapshots:
        yield f"{len(memory.snapshots)} snapshots are kept, over {config.max_snapshots}"
    if charged != memory.ledger.used_bytes:
        yield f"the ledger has {memory.ledger.used_bytes} bytes, but {charged} are in use"
    if memory.ledger.used_bytes > memory.ledger.limit_bytes:
        yield f"{memory.ledger.used_bytes} bytes used of {memory.ledger.limit_bytes}"
    if invalid_bytes != memory.withdrawn_bytes:
        yield f"{memory.withdrawn_bytes} bytes are withdrawn, but {invalid_bytes} invalid"
    pins = Counter(block for step in steps for blocks in step.saved.values() for block in blocks)
    for block in chain(memory.blocks, memory.snapshots):
        if block.pins != pins[block]:
            yield f"block {block.id} has {block.pins} pins, {pins[block]} in flight"


def _slots(config: SchedulerConfig, sequences: SequenceTable, memory: Memory) -> Iterator[str]:
    running = sequences.ordered(*HOLDING_SLOT)
    capacities = [slab.capacity for slab in memory.slots.slabs()]
    if config.shares_slabs and len(capacities) != len(set(capacities)):
        yield f"slabs of {sorted(capacities)} tokens a row: two are of one capacity"
    held = [seq.held_slot for seq in (*running, *sequences.leaving)] + sequences.vacated
    if len(held) != len(set(held)):
        yield "a slot is held twice"
    if set(held) != memory.slots.used_slots() or len(held) != memory.slots.used_rows:
        yield f"slots {sorted(held)} are held, {sorted(memory.slots.used_slots())} taken"
    if len(running) > config.completion_batch_size:
        yield f"{len(running)} sequences hold slots, over {config.completion_batch_size}"
    if sequences.count(Status.DECODING) > config.max_batch_size:
        yield f"{sequences.count(Status.DECODING)} sequences decode, over {config.max_batch_size}"
    if len(sequences.live) != len(running) + len(sequences.waiting) + len(sequences.loading):
        yield f"{len(sequences.live)} sequences are live, another number has a status"
    for seq in memory.fetch_reservations:
        has_come = seq.fetch.payloads or seq.fetch.state
        if seq not in sequences.loading.values() and not has_come:
            yield f"{seq.request.request_id} has room for blocks that are not on their way"
    for seq in sequences.live.values():
        if len(seq.fetch.payloads) > memory.fetch_reservations.get(seq, 0):
            yield f"{seq.request.request_id} has {len(seq.fetch.payloads)} blocks in no ledger"
        name = f"{seq.request.request_id} ({seq.status.name})"
        if seq.status is Status.FINISHED or (seq.slot is not None) != (seq.status in HOLDING_SLOT):
            yield f"{name} has slot {seq.slot}"
        if seq.status in HOLDING_SLOT and seq.num_computed_tokens > seq.capacity:
            yield f"{name} computed {seq.num_computed_tokens} positions of {seq.capacity}"
        kept = seq.snapshots.trailing
        if kept is not None and memory.snapshots.holds(kept) and kept.hash in seq.block_hashes:
            yield f"{name} has a private snapshot that is published"
        is_computed = seq.status in (Status.READY, Status.DECODING, Status.ENDING)
        may_end = config.decodes_ends and seq.status is Status.READY
        computed = seq.next_position if may_end else seq.num_computed_tokens
        if is_computed and computed != len(seq.token_ids) - 1 + seq.num_inflight:
            yield f"{name} is at {seq.num_computed_tokens} with {len(seq.token_ids)} tokens"
