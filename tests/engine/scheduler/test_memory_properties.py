"""Random operations on slots, pool and memory, compared with plain models of them. Each run is
made from one seed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import Slot
from engine.scheduler.memory import Memory
from engine.scheduler.pools.block_pool import Block, BlockPool
from engine.scheduler.pools.slot_table import SlotTable
from tests.engine.scheduler.harness import BLOCK_BYTES, config

SEEDS = given(seed=st.integers(0, 2**32))
MANY = settings(max_examples=100, deadline=None, derandomize=True)
OPERATIONS = 300
NAMES = [b"%d" % number for number in range(60)]
"""Hashes of blocks. A block that is gone may come back."""


@MANY
@SEEDS
def test_the_pool_evicts_the_least_recently_used_block_first(seed: int) -> None:
    pick = random.Random(seed)
    pool = BlockPool()
    blocks: dict[bytes, Block] = {}  # by hash
    idle: list[bytes] = []  # hashes, oldest first
    removed_blocks: list[Block] = []  # which may still be pinned
    reported: set[bytes] = set()
    for _ in range(OPERATIONS):
        held = [block for block in (*blocks.values(), *removed_blocks) if block.pins]
        match pick.choice(["add", "add", "add", "pin", "unpin", "unpin", "pop", "remove", "use"]):
            case "add" if len(blocks) < len(NAMES):
                name = pick.choice([name for name in NAMES if name not in blocks])
                blocks[name] = pool.add(name)
            case "pin" if blocks:
                block = pick.choice(list(blocks.values()))
                pool.pin(block)
                idle = [name for name in idle if name != block.hash]
            case "unpin" if held:
                block = pick.choice(held)
                pool.unpin(block)
                if not block.pins and blocks.get(block.hash) is block:
                    idle.append(block.hash)
            case "pop" if idle:
                assert pool.pop_oldest() is blocks.pop(idle.pop(0))
            case "remove" if blocks and pick.random() < 0.3:
                block = blocks.pop(pick.choice(list(blocks)))
                removed_blocks.append(block)
                pool.remove(block)
                idle = [name for name in idle if name != block.hash]
            case "use" if blocks:
                chain = [*pick.sample(sorted(blocks), min(len(blocks), 4)), b"unknown"]
                assert pool.touch(chain) == pool.match_prefix(chain) == len(chain) - 1
                used = [name for name in chain[::-1] if name in idle]
                idle = [name for name in idle if name not in used] + used
        assert not list(pool.faults())
        assert (len(pool), pool.num_evictable) == (len(blocks), len(idle))
        if pick.random() < 0.1:
            added, removed = pool.take_changes()
            assert reported.isdisjoint(added) and reported.issuperset(removed)
            reported = (reported | set(added)) - set(removed)
            assert reported == set(blocks)
    assert [pool.pop_oldest().hash for _ in range(pool.num_evictable)] == idle


@MANY
@SEEDS
def test_a_row_is_taken_once_and_a_slab_is_freed_only_when_empty(seed: int) -> None:
    pick = random.Random(seed)
    slots, taken, slabs = SlotTable(), set[Slot](), dict[int, tuple[int, int]]()
    for _ in range(OPERATIONS):
        match pick.choice(["add", "take", "take", "take", "release", "release", "free", "resize"]):
            case "add" if len(slabs) < 9:
                slab = slots.add(pick.randrange(1, 5), pick.choice([16, 64, 256]))
                assert slab.slab_id not in slabs
                slabs[slab.slab_id] = slab.rows, slab.capacity
            case "take":
                capacity = pick.choice([16, 64, 256])
                slot = slots.take(capacity)
                free = {
                    Slot(number, row)
                    for number, (rows, size) in slabs.items()
                    for row in range(rows)
                    if size == capacity
                } - taken
                assert slot == (min(free) if free else None)
                taken |= {slot} if slot else set()
            case "release" if taken:
                slot = pick.choice(sorted(taken))
                slots.release(slot)
                taken.remove(slot)
                with pytest.raises(ValueError, match="already free"):
                    slots.release(slot)
            case "resize" if slabs:
                slab = pick.choice(list(slots.slabs()))
                used_rows = [slot.row for slot in taken if slot.slab_id == slab.slab_id]
                assert slots.rows_to_keep(slab) == max(used_rows, default=-1) + 1
                rows = pick.randrange(1, 7)
                if rows <= max(used_rows, default=-1):
                    with pytest.raises(ValueError, match="in use"):
                        slots.resize(slab, rows)
                    continue
                assert slots.resize(slab, rows).rows == rows
                slabs[slab.slab_id] = rows, slab.capacity
            case "free" if any(True for _ in slots.empty_slabs()):
                del slabs[slots.pop_empty_slab().slab_id]
        used = Counter(slot.slab_id for slot in taken)
        assert slots.used_slots() == taken and slots.used_rows == len(taken)
        assert {slab.slab_id for slab in slots.slabs()} == slabs.keys()
        assert {slab.slab_id for slab in slots.empty_slabs()} == slabs.keys() - used.keys()
        assert sorted(slots.used()) == sorted((used[n], size) for n, (_, size) in slabs.items())


class Books:
    """Does to a `Memory` what a scheduler may do, and keeps its own record of the changes that go
    into plans, as an executor would."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = config(
            blocks=self.random.choice([9, 40, 300]),
            context_length=self.random.choice([30, 400]),
            completion_batch_size=self.random.randrange(1, 9),
            state_bytes=self.random.choice([0, 0, 700]),
            slot_block_bytes=BLOCK_BYTES * self.random.choice([1, 1, 4]),
            shares_slabs=self.random.choice([False, True]),
        )
        self.memory = Memory(self.config)
        self.held: list[tuple[Slot, int]] = []
        self.pinned: list[Block] = []
        self.withdrawn: list[Block] = []
        self.slabs: dict[int, int] = {}
        self.capacities: dict[int, int] = {}
        self.blocks: set[int] = set()
        self.number = 0

    def act(self) -> None:
        pick, memory = self.random, self.memory
        match pick.choice(
            "allocate allocate release add add add unpin unpin withdraw settle".split()
        ):
            case "allocate":
                tokens = pick.randrange(1, memory.largest_capacity + 1)
                allocated = memory.allocate_slot(tokens)
                if allocated is not None:
                    assert allocated[1] >= tokens and allocated[0] not in dict(self.held)
                    self.held.append(allocated)
            case "release" if self.held:
                memory.slots.release(self.held.pop(pick.randrange(len(self.held)))[0])
            case "add":
                self.number += 1
                block = memory.add_block(b"%d" % self.number)
                if block is not None:
                    self.pinned.append(block)
                    self.blocks.add(block.id)
            case "unpin" if self.pinned:
                memory.blocks.unpin(self.pinned.pop(pick.randrange(len(self.pinned))))
            case "withdraw" if self.pinned:
                self.withdrawn.append(self.pinned.pop())
                memory.withdraw(self.withdrawn[-1])
            case "settle" if self.withdrawn:
                memory.settle(self.withdrawn.pop())
        if pick.random() < 0.01:
            self._lose_everything()
        self._follow_plan()

    def _lose_everything(self) -> None:
        """Do what the scheduler does after a step that raised."""
        memory = self.memory
        memory.ran_out()
        memory.clear()
        self.held, self.pinned, self.withdrawn = [], [], []
        self.slabs, self.blocks = {}, set()
        assert memory.allocate_slot(memory.largest_capacity) is not None, (
            "one that is alone has room"
        )
        memory.clear()

    def _follow_plan(self) -> None:
        memory = self.memory
        for evict in memory.evictions:
            self.blocks.remove(evict.block_id)
        for slab in memory.freed_slabs:
            del self.slabs[slab]
        for resized in memory.resized_slabs:
            capacity = self.capacities[resized.slab_id]
            self.slabs[resized.slab_id] = self.config.slab_bytes(resized.rows, capacity)
            rows = [slot.row for slot, _ in self.held if slot.slab_id == resized.slab_id]
            assert resized.rows > max(rows, default=0)
        for new in memory.new_slabs:
            self.capacities[new.slab_id] = new.capacity
            self.slabs[new.slab_id] = self.config.slab_bytes(new.rows, new.capacity)
        memory.forget_changes()

    def check(self) -> None:
        memory = self.memory
        used = sum(self.slabs.values()) + len(self.blocks) * BLOCK_BYTES
        assert memory.ledger.used_bytes == used <= memory.ledger.limit_bytes
        rows = sum(self.config.slab_bytes(1, capacity) for _, capacity in self.held)
        in_flight = len(self.pinned) + len(self.withdrawn)
        assert memory.unevictable_bytes == rows + in_flight * BLOCK_BYTES
        assert {slot.slab_id for slot, _ in self.held} <= self.slabs.keys()
        assert {block.id for block in (*memory.blocks, *self.withdrawn)} == self.blocks


@MANY
@SEEDS
def test_the_ledger_equals_the_sum_of_the_plans_and_never_exceeds_its_limit(seed: int) -> None:
    books = Books(seed)
    for _ in range(OPERATIONS):
        books.act()
        books.check()
    for slot, _ in books.held:
        books.memory.slots.release(slot)
    for block in books.pinned:
        books.memory.blocks.unpin(block)
    for block in books.withdrawn:
        books.memory.settle(block)
    assert books.memory.unevictable_bytes == 0
    assert books.memory.allocate_slot(books.memory.largest_capacity) is not None
