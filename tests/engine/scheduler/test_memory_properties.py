"""Random operations on pages, snapshots and memory, compared with plain models of them. Each run is
made from one seed."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.memory import Memory, MemoryChanges
from engine.scheduler.pools.snapshot_pool import Snapshot, SnapshotPool
from engine.scheduler.sequences.sequence import Sequence
from tests.engine.scheduler.harness import BLOCK_BYTES, config, sequence

SEEDS = given(seed=st.integers(0, 2**32))
MANY = settings(max_examples=100, deadline=None, derandomize=True)
OPERATIONS = 300
NAMES = [b"%016d" % number for number in range(60)]
"""Hashes of snapshots. A snapshot that is gone may come back."""


@MANY
@SEEDS
def test_the_pool_evicts_the_least_recently_used_snapshot_first(seed: int) -> None:
    pick = random.Random(seed)
    pool = SnapshotPool(100)
    known: dict[bytes, Snapshot] = {}
    idle: list[bytes] = []  # hashes, oldest first
    removed: list[Snapshot] = []  # which may still be pinned
    reported: set[bytes] = set()
    for _ in range(OPERATIONS):
        held = [one for one in (*known.values(), *removed) if one.pins]
        match pick.choice(["add", "add", "add", "pin", "unpin", "unpin", "pop", "remove", "use"]):
            case "add" if len(known) < len(NAMES):
                name = pick.choice([name for name in NAMES if name not in known])
                known[name] = pool.add(name)
            case "pin" if known:
                one = pick.choice(list(known.values()))
                pool.pin(one)
                idle = [name for name in idle if name != one.hash]
            case "unpin" if held:
                one = pick.choice(held)
                pool.unpin(one)
                if not one.pins and known.get(one.hash) is one:
                    idle.append(one.hash)
            case "pop" if idle:
                assert pool.pop_oldest() is known.pop(idle.pop(0))
            case "remove" if known and pick.random() < 0.3:
                one = known.pop(pick.choice(list(known)))
                removed.append(one)
                pool.remove(one)
                idle = [name for name in idle if name != one.hash]
            case "use" if known:
                name = pick.choice(sorted(known))
                pool.touch(name)
                idle = [n for n in idle if n != name] + [name] * (name in idle)
        assert not list(pool.faults())
        assert (len(pool), pool.num_evictable) == (len(known), len(idle))
        if pick.random() < 0.1:
            added, gone = pool.take_changes()
            assert reported.isdisjoint(added) and reported.issuperset(gone)
            reported = (reported | set(added)) - set(gone)
            assert reported == set(known)
    assert [pool.pop_oldest().hash for _ in range(pool.num_evictable)] == idle


class Books:
    """Does to a `Memory` what a scheduler may do, and follows the plans as an executor would: each
    page holds the name of its content."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = config(
            blocks=self.random.choice([12, 40, 300]),
            blocks_per_page=self.random.choice([1, 2, 4]),
            context_length=self.random.choice([30, 400]),
            completion_batch_size=self.random.randrange(1, 9),
            state_bytes=self.random.choice([0, 0, 700]),
            gather_token_bytes=self.random.choice([0, BLOCK_BYTES // 16]),
            gather_rows=self.random.choice([1, 2, 99]),
            pads_gathers=self.random.random() < 0.3,
            unpacked_token_bytes=self.random.choice([0, BLOCK_BYTES // 4]),
        )
        self.memory = Memory(self.config)
        self.seqs: list[Sequence] = []
        self.fixed: list[Sequence] = []
        self.passes: list[int] = []
        self.number = 0
        self.num_pages = 0
        self.content: dict[int, object] = {}
        self.tables: dict[int, list[int]] = {}
        self.written: dict[object, object] = {}
        """The content that a page, by its object, must have."""

    def act(self) -> None:
        pick, memory = self.random, self.memory
        free = [seq for seq in self.seqs if seq not in self.fixed]
        match pick.choice("begin begin grow grow grow end pass done fix unfix unpack all".split()):
            case "begin":
                self._begin()
            case "grow" if free:
                seq = pick.choice(free)
                memory.grow(seq, len(seq.pages) * self.config.page_tokens + pick.randrange(1, 40))
            case "end" if free:
                seq = pick.choice(free)
                self.seqs.remove(seq)
                memory.release(seq)
                assert seq.slot is not None
                memory.release_slot(seq.slot)
            case "pass":
                size = pick.randrange(1, self.config.limit_bytes)
                if memory.reserve_pass(size):
                    self.passes.append(size)
            case "done" if self.passes:
                memory.release_pass(self.passes.pop())
            case "fix" if free and not memory.unfixed:
                self.fixed.append(pick.choice(free))
                memory.fix(self.fixed[-1])
            case "unfix" if self.fixed:
                memory.unfix(self.fixed.pop())
            case "unpack" if free:
                seq = pick.choice(free)
                if seq.pages:
                    memory.unpack(seq, min(seq.capacity, seq.max_positions))
            case "all" if pick.random() < 0.1:
                memory.evict_all()
        memory.update_gathers()
        if pick.random() < 0.4:
            self._follow(memory.take_plan())

    def _begin(self) -> None:
        slot = self.memory.take_slot()
        if slot is None:
            return
        self.number += 1
        seq = sequence([self.number, *range(self.random.randrange(1, 100))], 4)
        seq.slot = slot
        self.memory.begin(seq)
        self.seqs.append(seq)
        known = [page for page in self.memory.pages if page.content]
        if known and self.random.random() < 0.5:  # a shared page
            shared = self.random.choice(known)
            self.memory.pages.acquire(shared)
            self.memory.replace(seq, 0, [shared])
            if not self.memory.reserve_gathers(seq, seq.capacity):
                self.memory.replace(seq, 0, [])

    def _follow(self, plan: MemoryChanges) -> None:
        assert not list(self.memory.pages.faults())
        fixed = {page.number for seq in self.fixed for page in seq.pages}
        moved = {}
        for move in plan.moved_pages:
            assert move.source not in fixed and move.target < plan.num_pages <= move.source
            moved[move.target] = self.content[move.source]
        self.content |= moved
        self.num_pages = plan.num_pages or self.num_pages
        self.content = {n: held for n, held in self.content.items() if n < self.num_pages}
        for table in plan.tables:
            self.tables.setdefault(table.slot, [])[table.first :] = table.pages
        for seq in self.seqs:
            assert self.tables.get(seq.slot or 0, [])[: len(seq.pages)] == [
                page.number for page in seq.pages
            ]
        for page in self.memory.pages:
            if page not in self.written:  # it is written, and named
                self.number += 1
                self.written[page] = self.content[page.number] = self.number
                end = self.config.page_tokens
                self.memory.pages.name(page, end, b"%016d" % self.number)
            assert self.content[page.number] == self.written[page], "no content is lost"

    def check(self) -> None:
        memory, config = self.memory, self.config
        lengths = sorted((len(seq.pages) for seq in self.seqs if seq.pages), reverse=True)
        gathered = lengths[: config.gather_rows]
        if config.pads_gathers:
            gathered = [lengths[0] for _ in gathered]
        used = memory.pages.num_pages * config.page_bytes + len(self.seqs) * config.state_bytes
        used += sum(self.passes) + sum(gathered) * config.page_tokens * config.gather_token_bytes
        used += sum(memory.unpacked_bytes.values())
        assert memory.ledger.used_bytes == used <= memory.ledger.limit_bytes
        pages = {page for seq in self.seqs for page in seq.pages}
        held = len(pages) * config.page_bytes + sum(self.passes)
        assert memory.used_bytes(of_background=True) == held


@MANY
@SEEDS
def test_the_ledger_equals_what_plans_hold_and_no_content_is_lost(seed: int) -> None:
    books = Books(seed)
    for _ in range(OPERATIONS):
        books.act()
        books.check()
    memory = books.memory
    for seq in books.fixed:
        memory.unfix(seq)
    for seq in books.seqs:
        memory.release(seq)
        assert seq.slot is not None
        memory.release_slot(seq.slot)
    for size in books.passes:
        memory.release_pass(size)
    memory.take_plan()
    memory.update_gathers()
    assert memory.used_bytes(of_background=True) == 0
    long = sequence([0] * 10, 4)
    long.slot = memory.take_slot()
    memory.begin(long)
    assert memory.grow(long, memory.capacity), "one that is alone has all memory"
