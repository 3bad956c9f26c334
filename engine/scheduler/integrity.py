"""What must hold between any two calls. Walks over everything: for tests and idle times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import Step
from engine.scheduler.memory import Memory
from engine.scheduler.roster import Roster
from engine.scheduler.sequence import HOLDING, State


class IntegrityError(AssertionError):
    """The scheduler's books do not agree with each other."""


def check(
    config: SchedulerConfig, roster: Roster, memory: Memory, in_flight: Iterable[Step]
) -> None:
    """Raises `IntegrityError` with everything that is wrong."""
    faults = [*_memory(config, memory, list(in_flight)), *_slots(config, roster, memory)]
    if faults:
        raise IntegrityError("; ".join(faults))


def _memory(config: SchedulerConfig, memory: Memory, in_flight: list[Step]) -> Iterator[str]:
    yield from memory.pool.faults()
    yield from memory.snapshots.faults()
    charged = sum(config.bytes_of(slab.rows, slab.capacity) for slab in memory.slots.slabs())
    charged += len(memory.pool) * config.block_bytes
    charged += len(memory.snapshots) * config.state_bytes
    charged += sum(memory.fetched.values()) * config.block_bytes
    condemned_bytes = sum(
        memory.bytes_of(block) for step in in_flight for _, block in step.condemned
    )
    charged += condemned_bytes
    if len(memory.snapshots) > config.kept_states:
        yield f"{len(memory.snapshots)} snapshots are kept, over {config.kept_states}"
    if charged != memory.ledger.used_bytes:
        yield f"the ledger has {memory.ledger.used_bytes} bytes, what is there takes {charged}"
    if memory.ledger.used_bytes > memory.ledger.limit_bytes:
        yield f"{memory.ledger.used_bytes} bytes used of {memory.ledger.limit_bytes}"
    if condemned_bytes != memory.withdrawn_bytes:
        yield f"{memory.withdrawn_bytes} bytes withdrawn, but {condemned_bytes} condemned"
    pins = Counter(
        block for step in in_flight for blocks in step.saved.values() for block in blocks
    )
    for block in chain(memory.pool, memory.snapshots):
        if block.pins != pins[block]:
            yield f"block {block.id} has {block.pins} pins, {pins[block]} in flight"


def _slots(config: SchedulerConfig, roster: Roster, memory: Memory) -> Iterator[str]:
    holders = roster.ordered(*HOLDING)
    held = [seq.holder for seq in (*holders, *roster.leaving)] + roster.vacated
    if len(held) != len(set(held)):
        yield "a slot is held twice"
    if set(held) != memory.slots.taken() or len(held) != memory.slots.used_rows:
        yield f"slots {sorted(held)} are held, {sorted(memory.slots.taken())} taken"
    if len(holders) > config.completion_batch_size:
        yield f"{len(holders)} sequences hold slots, over {config.completion_batch_size}"
    if roster.count(State.DECODING) > config.max_batch_size:
        yield f"{roster.count(State.DECODING)} sequences decode, over {config.max_batch_size}"
    if len(roster.live) != len(holders) + len(roster.waiting) + len(roster.loading):
        yield f"{len(roster.live)} are live, another number is in some state"
    for seq in memory.fetched:
        if seq not in roster.loading.values() and not seq.payloads:
            yield f"{seq.request.request_id} has room for blocks that nobody sends"
    for seq in roster.live.values():
        if len(seq.payloads) > memory.fetched.get(seq, 0):
            yield f"{seq.request.request_id} has {len(seq.payloads)} blocks in no ledger"
        name = f"{seq.request.request_id} ({seq.state.name})"
        if seq.state is State.FINISHED or (seq.slot is not None) != (seq.state in HOLDING):
            yield f"{name} has slot {seq.slot}"
        if seq.state in HOLDING and seq.computed > seq.capacity:
            yield f"{name} computed {seq.computed} positions of {seq.capacity}"
        trail = seq.trail
        if trail is not None and memory.snapshots.holds(trail) and trail.hash in seq.hashes:
            yield f"{name} keeps a snapshot to itself that others may find"
        decoding = seq.state in (State.DECODING, State.ENDING)
        if decoding and seq.computed != len(seq.tokens) - 1 + seq.pending:
            yield f"{name} is at {seq.computed} with {len(seq.tokens)} tokens"
