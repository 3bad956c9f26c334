"""Blocks and slots under one limit."""

from __future__ import annotations

import pytest

from engine.plan import Evict, ResizeSlab, SlabSpec, Slot
from engine.scheduler.memory import Memory
from engine.scheduler.pools.block_pool import BlockPool
from engine.scheduler.pools.ledger import STEPS_TO_RAISE, Ledger
from engine.scheduler.pools.slot_table import SlotTable
from tests.engine.scheduler.harness import BLOCK_BYTES, config


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


def test_a_block_is_evicted_only_when_nothing_in_flight_refers_to_it() -> None:
    pool = BlockPool()
    first, second = pool.add(b"1"), pool.add(b"2")
    pool.unpin(second)
    pool.unpin(first)
    pool.pin(second)
    assert pool.num_evictable == 1
    assert pool.pop_oldest() is first
    pool.unpin(second)
    assert pool.pop_oldest() is second


def test_touching_a_chain_makes_its_head_the_last_to_be_evicted() -> None:
    pool = BlockPool()
    for block_hash in (b"1", b"2", b"3", b"x"):
        pool.unpin(pool.add(block_hash))
    assert pool.touch([b"1", b"2", b"3", b"4"]) == 3
    assert [pool.pop_oldest().hash for _ in range(4)] == [b"x", b"3", b"2", b"1"]


def test_the_pool_reports_net_changes() -> None:
    pool = BlockPool()
    pool.unpin(pool.add(b"1"))
    pool.unpin(pool.add(b"2"))
    pool.pop_oldest()
    assert pool.take_changes() == ([b"2"], [])
    pool.pop_oldest()
    pool.add(b"2")
    pool.add(b"3")
    assert pool.take_changes() == ([b"3"], [])


def test_a_removed_block_does_not_come_back_when_it_is_unpinned() -> None:
    pool = BlockPool()
    block = pool.add(b"1")
    pool.remove(block)
    pool.unpin(block)
    assert not len(pool) and not pool.num_evictable and not list(pool.faults())


def test_the_lowest_free_row_of_the_oldest_slab_is_taken() -> None:
    slots = SlotTable()
    slots.add(2, 16)
    slots.add(2, 16)
    assert [slots.take(16) for _ in range(3)] == [Slot(0, 0), Slot(0, 1), Slot(1, 0)]
    assert slots.take(64) is None
    slots.release(Slot(0, 1))
    assert slots.take(16) == Slot(0, 1)
    slots.release(Slot(1, 0))
    assert [slab.slab_id for slab in slots.empty_slabs()] == [1]
    with pytest.raises(ValueError, match="already free"):
        slots.release(Slot(1, 0))


def test_empty_slabs_are_freed_before_cached_blocks_and_only_when_needed() -> None:
    memory = Memory(config(blocks=32, context_length=16, completion_batch_size=4))
    block = memory.add_block(b"1")
    assert block is not None
    memory.blocks.unpin(block)
    allocated = memory.allocate_slot(16)
    assert allocated == (Slot(0, 0), 16)
    memory.slots.release(allocated[0])
    assert not memory.freed_slabs
    for number in range(31):
        memory.add_block(b"n%d" % number)
    assert memory.freed_slabs == [0] and not memory.evictions
    assert memory.add_block(b"last") is not None
    assert memory.evictions == [Evict(0)]


def test_nothing_is_evicted_for_what_does_not_fit_anyway() -> None:
    memory = Memory(config(blocks=8, context_length=32))
    for number in range(8):
        block = memory.add_block(b"%d" % number)
        assert block is not None
        if number:
            memory.blocks.unpin(block)
    assert memory.allocate_slot(32) is None
    assert not memory.evictions and memory.ledger.used_bytes == 8 * BLOCK_BYTES


def test_rows_that_are_not_needed_yet_do_not_cost_the_whole_cache() -> None:
    memory = Memory(config(blocks=64, context_length=32, completion_batch_size=8))
    for number in range(60):
        block = memory.add_block(b"%d" % number)
        assert block is not None
        memory.blocks.unpin(block)
    assert memory.allocate_slot(32) is not None
    assert len(memory.blocks) >= 30


def test_a_free_larger_row_is_taken_when_there_is_no_other_room() -> None:
    memory = Memory(config(blocks=4096, context_length=1024))
    assert memory.allocate_slot(1024) == (Slot(0, 0), 1024)
    for number in range(4096 - 2 * 256):
        assert memory.add_block(b"%d" % number) is not None
    assert memory.allocate_slot(512) == (Slot(0, 1), 1024)
    assert memory.allocate_slot(512) is None


def test_slots_larger_than_their_blocks_are_charged_in_full() -> None:
    """As on the CPU, where slots hold quantized keys and values in a form for attention."""
    settings = config(blocks=40, slot_block_bytes=4 * BLOCK_BYTES, context_length=100)
    assert settings.capacity_classes()[-1] == 10 * settings.block_size
    memory = Memory(settings)
    for number in range(39):
        assert memory.add_block(b"%d" % number) is not None
    assert memory.allocate_slot(4) is None, "four blocks' worth for four tokens"
    for block in list(memory.blocks)[:3]:
        memory.blocks.unpin(block)
    assert memory.allocate_slot(4) is not None
    assert len(memory.evictions) == 3
    assert memory.ledger.used_bytes == 40 * BLOCK_BYTES


def test_free_rows_of_a_slab_in_use_are_no_pressure() -> None:
    memory = Memory(config(blocks=512, context_length=64, completion_batch_size=8))
    first = memory.allocate_slot(64)
    assert first is not None
    (slab,) = memory.new_slabs
    assert slab.rows > 1
    assert memory.unevictable_bytes == 16 * BLOCK_BYTES
    assert memory.ledger.used_bytes == slab.rows * 16 * BLOCK_BYTES
    block = memory.add_block(b"1")
    assert block is not None and memory.unevictable_bytes == 17 * BLOCK_BYTES
    memory.blocks.unpin(block)
    memory.slots.release(first[0])
    assert memory.unevictable_bytes == 0


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
    taken = [memory.allocate_slot(256) for _ in range(3)]
    assert all(taken) and memory.ledger.used_bytes == 3 * 64 * BLOCK_BYTES
    memory.forget_changes()
    for found in taken[1:]:
        assert found is not None
        memory.slots.release(found[0])
    cached = [memory.add_block(b"%d" % number) for number in range(64)]
    assert all(cached) and not memory.resized_slabs
    assert memory.add_block(b"one more") is not None
    assert memory.resized_slabs == [ResizeSlab(0, 1)] and not memory.evictions
    assert memory.ledger.used_bytes == (64 + 65) * BLOCK_BYTES


def test_with_shared_slabs_and_much_memory_short_sequences_share_a_class_with_longer_ones() -> None:
    fields = {"context_length": 8192, "completion_batch_size": 4, "shares_slabs": True}
    assert config(blocks=2 * 8192, **fields).capacity_classes() == (2048, 8192)
    assert config(blocks=4096, **fields).capacity_classes() == (512, 2048, 8192)
