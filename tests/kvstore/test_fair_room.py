"""The room of a store that several models share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.clock import StoreClock
from kvstore.directory import BlockDirectory, BlockKey
from kvstore.index import IN_USE_S, LruIndex
from kvstore.store import DiskStore
from shared.hashing import HASH_BYTES, namespace_root, state_namespace
from tests.kvstore.blocks import file_of, key_of

A, B, C = ("0a" * HASH_BYTES, "0b" * HASH_BYTES, "0c" * HASH_BYTES)
SIZE = len(file_of(100))
ROOM = 12


class SharedStore:
    """A store with room for `ROOM` blocks."""

    def __init__(self, root: Path) -> None:
        self.now = 1_000_000.0
        self.directory = BlockDirectory(root)
        self.open()

    def open(self) -> None:
        clock = StoreClock(self.directory.read_clock(), wall=self._time, monotonic=self._time)
        self.store = DiskStore(self.directory, max_bytes=ROOM * SIZE, clock=clock)
        self.store.load()

    def put(self, namespace: str, *numbers: int) -> None:
        for number in numbers:
            self.now += 1
            file = file_of(100 + number, namespace=namespace)  # all have the same size
            self.store.put(key_of(100 + number, namespace), file, durable=False)

    def numbers(self, namespace: str) -> list[int]:
        """Return the blocks of ``namespace`` that are there."""
        return [n for n in range(100) if self.store.has([key_of(100 + n, namespace)])]

    def _time(self) -> float:
        return self.now


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedStore]:
    found = SharedStore(tmp_path)
    yield found
    found.directory.close()


def test_a_flood_of_one_model_takes_nothing_from_one_within_its_share(shared: SharedStore) -> None:
    shared.put(A, *range(4))
    shared.put(B, *range(50))
    assert shared.numbers(A) == [0, 1, 2, 3]
    assert shared.numbers(B) == list(range(42, 50)), "the least recently used ones went"


def test_a_model_borrows_what_others_do_not_need_and_gives_it_back(shared: SharedStore) -> None:
    shared.put(A, *range(ROOM))
    assert len(shared.numbers(A)) == ROOM
    shared.put(B, *range(30))
    assert shared.numbers(A) == list(range(6, 12))
    assert shared.numbers(B) == list(range(24, 30))
    shared.put(C, *range(30))
    assert [len(shared.numbers(each)) for each in (A, B, C)] == [4, 4, 4]


def test_shares_hold_after_a_restart(shared: SharedStore) -> None:
    shared.put(A, *range(4))
    shared.put(B, *range(20))
    shared.store.flush()
    shared.open()
    shared.put(B, *range(20, 40))
    assert shared.numbers(A) == [0, 1, 2, 3]


def test_a_model_that_nobody_uses_any_more_has_no_share(shared: SharedStore) -> None:
    shared.put(A, *range(4))
    shared.put(B, 0)
    shared.now += IN_USE_S + 1
    shared.put(B, *range(1, ROOM))
    assert shared.numbers(A) == []
    assert shared.numbers(B) == list(range(ROOM))


def test_blocks_and_states_of_a_model_have_one_share(shared: SharedStore) -> None:
    root = namespace_root(fingerprint="a", kv_bits=16, kv_group_size=64, block_size=16)
    states = state_namespace(root, ["float32 4"]).hex()
    shared.put(root.hex(), *range(30))
    shared.put(states, *range(30))
    shared.put(B, *range(30))
    assert len(shared.numbers(B)) == ROOM // 2


def test_only_a_model_with_its_share_or_more_loses_blocks() -> None:
    """Random sizes, uses and evictions."""
    rng = random.Random(5)
    index = LruIndex()
    index.is_complete = True
    sizes: dict[BlockKey, int] = {}  # the least recently used first
    for at in range(3000):
        key = key_of(rng.randrange(60), rng.choice((A, A, A, A, B, C)))
        size = rng.randrange(1, 1000)
        while index.bytes + size > 20_000:
            evicted = index.next_to_evict(key.namespace, size, at)
            assert evicted is not None
            used = Counter({key.namespace: size})
            for each, its_size in sizes.items():
                used[each.namespace] += its_size
            victim = evicted[0].namespace
            assert used[victim] >= used.total() / len(used)
            assert evicted[0] == next(each for each in sizes if each.namespace == victim)
            index.remove(evicted[0])
            del sizes[evicted[0]]
        index.record_use(key, size, at)
        sizes.pop(key, None)
        sizes[key] = size
        assert (index.bytes, len(index)) == (sum(sizes.values()), len(sizes))
