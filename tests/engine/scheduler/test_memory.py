"""Blocks and slots under one limit. What holds after any operations is in
`test_memory_properties.py`."""

from __future__ import annotations

import pytest

from engine.plan import Evict, ResizeSlab, SlabSpec, Slot
from engine.scheduler.memory import Memory
from engine.scheduler.pools.ledger import STEPS_TO_RAISE, Ledger
from tests.engine.scheduler.harness import BLOCK_BYTES, config


def add_blocks(memory: Memory, count: int, pinned: int = 0) -> None:
    """Add ``count`` blocks. All but the first ``pinned`` may be evicted."""
    for number in range(count):
        block = memory.add_block(b"%d" % number)
        assert block is not None
        if number >= pinned:
            memory.blocks.unpin(block)


def test_the_ledger_never_goes_over_its_limit() -> None:
    ledger = Ledger(100)
    ledger.reserve(60)
    assert ledger.shortfall(40) == 0 and ledger.shortfall(41) == 1
    with pytest.raises(RuntimeError):
        ledger.reserve(41)


def test_a_limit_that_was_lowered_is_raised_again_after_many_steps() -> None:
    """Another program may have used the memory for a while."""
    ledger = Ledger(1000)
    ledger.reserve(600)
    ledger.ran_out(least_bytes=100)
    assert ledger.limit_bytes == 540
    for _ in range(2 * STEPS_TO_RAISE - 1):
        ledger.step_succeeded()
    assert ledger.limit_bytes == 540
    ledger.step_succeeded()
    assert ledger.limit_bytes == 640
    ledger.ran_out(least_bytes=100)
    lowered = ledger.limit_bytes
    for _ in range(2 * STEPS_TO_RAISE):
        ledger.step_succeeded()
    assert ledger.limit_bytes == lowered, "it waits longer each time"
    for _ in range(30 * STEPS_TO_RAISE):
        ledger.step_succeeded()
    assert ledger.limit_bytes == 1000


def test_empty_slabs_are_freed_before_cached_blocks_and_only_when_needed() -> None:
    memory = Memory(config(blocks=32, context_length=16, completion_batch_size=4))
    assert memory.allocate_slot(16) == (Slot(0, 0), 16)
    memory.slots.release(Slot(0, 0))
    assert not memory.freed_slabs
    add_blocks(memory, 32)
    assert memory.freed_slabs == [0] and not memory.evictions
    assert memory.add_block(b"last") is not None
    assert memory.evictions == [Evict(0)]


def test_nothing_is_evicted_for_what_does_not_fit_anyway() -> None:
    memory = Memory(config(blocks=8, context_length=32))
    add_blocks(memory, 8, pinned=1)
    assert memory.allocate_slot(32) is None
    assert not memory.evictions and memory.ledger.used_bytes == 8 * BLOCK_BYTES


def test_rows_that_are_not_needed_yet_do_not_cost_the_whole_cache() -> None:
    memory = Memory(config(blocks=1024, context_length=32, completion_batch_size=16))
    add_blocks(memory, 1020, pinned=960)
    assert memory.allocate_slot(32) is not None
    assert memory.blocks.num_evictable >= 30


def test_a_free_larger_row_is_taken_when_there_is_no_other_room() -> None:
    memory = Memory(config(blocks=4096, context_length=1024))
    assert memory.allocate_slot(1024) == (Slot(0, 0), 1024)
    add_blocks(memory, 4096 - 2 * 256, pinned=4096)
    assert memory.allocate_slot(512) == (Slot(0, 1), 1024)
    assert memory.allocate_slot(512) is None


def test_slots_larger_than_their_blocks_are_charged_in_full() -> None:
    """As on the CPU, where slots hold quantized keys and values in a form for attention."""
    settings = config(blocks=40, slot_block_bytes=4 * BLOCK_BYTES, context_length=100)
    assert settings.capacity_classes()[-1] == 10 * settings.block_size
    memory = Memory(settings)
    add_blocks(memory, 39, pinned=39)
    assert memory.allocate_slot(4) is None, "four blocks' worth for four tokens"
    for block in list(memory.blocks)[:3]:
        memory.blocks.unpin(block)
    assert memory.allocate_slot(4) is not None
    assert len(memory.evictions) == 3
    assert memory.ledger.used_bytes == 40 * BLOCK_BYTES


def test_slots_of_one_capacity_share_a_slab_that_grows_by_an_eighth_of_the_memory_at_most() -> None:
    memory = Memory(
        config(blocks=4096, context_length=1024, completion_batch_size=32, shares_slabs=True)
    )
    slots = [memory.allocate_slot(600) for _ in range(8)]
    assert [found and found[0] for found in slots] == [Slot(0, row) for row in range(8)]
    (slab,) = memory.new_slabs
    assert slab == SlabSpec(0, 8, 1024) and not memory.resized_slabs
    memory.forget_changes()
    for row in range(8, 13):
        assert memory.allocate_slot(600) == (Slot(0, row), 1024)
    assert memory.resized_slabs == [ResizeSlab(0, 14)] and not memory.new_slabs
    assert memory.ledger.used_bytes == 14 * 256 * BLOCK_BYTES


def test_the_last_free_rows_are_given_back_after_the_cache_and_before_a_request_must_wait() -> None:
    memory = Memory(
        config(blocks=4 * 64, context_length=256, completion_batch_size=4, shares_slabs=True)
    )
    assert all(memory.allocate_slot(256) for _ in range(3))
    assert memory.ledger.used_bytes == 3 * 64 * BLOCK_BYTES
    memory.forget_changes()
    for row in (1, 2):
        memory.slots.release(Slot(0, row))
    add_blocks(memory, 64, pinned=64)
    assert not memory.resized_slabs
    assert memory.add_block(b"one more") is not None
    assert memory.resized_slabs == [ResizeSlab(0, 1)] and not memory.evictions
    assert memory.ledger.used_bytes == (64 + 65) * BLOCK_BYTES


def test_many_free_rows_are_given_back_before_the_cache() -> None:
    fields = {"context_length": 2048, "completion_batch_size": 8, "shares_slabs": True}
    memory = Memory(config(blocks=10 * 512, **fields))
    assert all(memory.allocate_slot(2048) for _ in range(8))
    memory.forget_changes()
    for row in range(1, 8):
        memory.slots.release(Slot(0, row))
    add_blocks(memory, 2 * 512 + 1)
    assert memory.resized_slabs == [ResizeSlab(0, 2)] and not memory.evictions


def test_with_shared_slabs_and_much_memory_short_sequences_share_a_class_with_longer_ones() -> None:
    fields = {"context_length": 8192, "completion_batch_size": 4, "shares_slabs": True}
    assert config(blocks=2 * 8192, **fields).capacity_classes() == (2048, 8192)
    assert config(blocks=4096, **fields).capacity_classes() == (512, 2048, 8192)
