"""Invariants that hold between any two calls. Checking them visits every structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

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
    faults = [*_memory(config, memory, list(steps)), *_tables(config, sequences, memory)]
    faults += _slots(config, sequences, memory)
    if faults:
        raise IntegrityError("; ".join(faults))


def _memory(config: SchedulerConfig, memory: Memory, steps: list[InFlightStep]) -> Iterator[str]:
    yield from memory.pages.faults()
    yield from memory.snapshots.faults()
    charged = config.beside_bytes + memory.pass_bytes + memory.gather_bytes
    charged += memory.pages.num_pages * config.page_bytes
    charged += (len(memory.snapshots) + len(memory.used_slots)) * config.state_bytes
    charged += sum(memory.fetch_reservations.values()) + sum(memory.unpacked_bytes.values())
    invalid = sum(len(step.invalid) for step in steps) * config.state_bytes
    charged += invalid
    if len(memory.snapshots) > config.max_snapshots:
        yield f"{len(memory.snapshots)} snapshots are kept, over {config.max_snapshots}"
    if charged != memory.ledger.used_bytes:
        yield f"the ledger has {memory.ledger.used_bytes} bytes, but {charged} are in use"
    if memory.ledger.used_bytes > memory.ledger.limit_bytes:
        yield f"{memory.ledger.used_bytes} bytes used of {memory.ledger.limit_bytes}"
    if invalid != memory.withdrawn_bytes:
        yield f"{memory.withdrawn_bytes} bytes are withdrawn, but {invalid} invalid"
    pins = Counter(one for step in steps for saved in step.saved.values() for one in saved)
    for snapshot in memory.snapshots:
        if snapshot.pins != pins[snapshot]:
            yield f"snapshot {snapshot.id} has {snapshot.pins} pins, {pins[snapshot]} in flight"


def _tables(config: SchedulerConfig, sequences: SequenceTable, memory: Memory) -> Iterator[str]:
    holders = [seq for seq in (*sequences.ordered(*HOLDING_SLOT), *sequences.leaving) if seq.pages]
    refs = Counter(page for seq in holders for page in seq.pages)
    for page in memory.pages:
        if page.refs != refs[page]:
            yield f"page {page.number} has {page.refs} references, and is in {refs[page]} tables"
        if page.refs > 1 and page.named_end < config.page_tokens:
            yield f"page {page.number} is shared, and not full"
    if not refs.keys() <= set(memory.pages):
        yield "a free page is in a table"
    for seq in holders:
        if seq not in memory.holders:
            yield f"{seq.request.request_id} has pages, and is no holder"
        if config.keeps_kv and seq.capacity != len(seq.pages) * config.page_tokens:
            yield f"{seq.request.request_id} has room for {seq.capacity} in {len(seq.pages)} pages"
        number, place = divmod(seq.num_computed_tokens, config.page_tokens)
        is_known = number < len(seq.pages) and not seq.is_finished and config.keeps_kv
        if is_known and seq.pages[number].named_end > place:
            yield f"{seq.request.request_id} writes a page that others may read"
    fixed = Counter(page for seq in holders if seq.pass_end for page in seq.pages)
    fixed.update(memory.unfixed)
    for page in memory.pages:
        if page.passes != fixed[page]:
            yield f"{page.passes} passes keep page {page.number}, which {fixed[page]} use"


def _slots(config: SchedulerConfig, sequences: SequenceTable, memory: Memory) -> Iterator[str]:
    running = sequences.ordered(*HOLDING_SLOT)
    held = [seq.held_slot for seq in (*running, *sequences.leaving)] + sequences.vacated
    if len(held) != len(set(held)):
        yield "a slot is held twice"
    if set(held) != memory.used_slots:
        yield f"slots {sorted(held)} are held, {sorted(memory.used_slots)} taken"
    if len(running) > config.completion_batch_size:
        yield f"{len(running)} sequences hold slots, over {config.completion_batch_size}"
    if sequences.count(Status.DECODING) > config.max_batch_size:
        yield f"{sequences.count(Status.DECODING)} sequences decode, over {config.max_batch_size}"
    others = len(sequences.waiting) + len(sequences.loading) + len(sequences.arriving())
    if len(sequences.live) != len(running) + others:
        yield f"{len(sequences.live)} sequences are live, another number has a status"
    for seq in memory.fetch_reservations:
        has_come = seq.fetch.payloads or seq.fetch.state
        if seq not in sequences.loading.values() and not has_come:
            yield f"{seq.request.request_id} has room for pages that are not on their way"
    for seq in sequences.live.values():
        fetched = len(seq.fetch.payloads) - memory.pages_ahead(seq)
        fetched_bytes = fetched * config.page_bytes
        if fetched_bytes > memory.fetch_reservations.get(seq, 0):
            yield f"{seq.request.request_id} has {len(seq.fetch.payloads)} pages in no ledger"
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
