"""The room of a store that several models share."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvstore.directory import BlockKey
from kvstore.index import IN_USE_S, LruIndex
from shared.hashing import HASH_BYTES, namespace_root, state_namespace
from tests.kvstore.blocks import file_of, key_of
from tests.kvstore.tier import Tier

A, B, C = ("0a" * HASH_BYTES, "0b" * HASH_BYTES, "0c" * HASH_BYTES)
FIRST = 100
"""Files of blocks have one size from this number on."""
SIZE = len(file_of(FIRST))
ROOM = 12
"""How many blocks the store has room for."""


def put(tier: Tier, namespace: str, *numbers: int) -> None:
    tier.put(*(FIRST + number for number in numbers), namespace=namespace)


def numbers(tier: Tier, namespace: str) -> list[int]:
    """Return the blocks of ``namespace`` that are there."""
    there = tier.there(*range(FIRST, 2 * FIRST), namespace=namespace)
    return sorted(number - FIRST for number in there)


@pytest.fixture
def shared(tier: Tier) -> Tier:
    tier.open(max_bytes=ROOM * SIZE)
    return tier


def test_a_flood_of_one_model_takes_nothing_from_one_within_its_share(shared: Tier) -> None:
    put(shared, A, *range(4))
    put(shared, B, *range(50))
    assert numbers(shared, A) == [0, 1, 2, 3]
    assert numbers(shared, B) == list(range(42, 50)), "the least recently used ones went"


def test_a_model_borrows_what_others_do_not_need_and_gives_it_back(shared: Tier) -> None:
    put(shared, A, *range(ROOM))
    assert len(numbers(shared, A)) == ROOM
    put(shared, B, *range(30))
    assert numbers(shared, A) == list(range(6, 12))
    assert numbers(shared, B) == list(range(24, 30))
    put(shared, C, *range(30))
    assert [len(numbers(shared, each)) for each in (A, B, C)] == [4, 4, 4]


def test_shares_hold_after_a_restart(shared: Tier) -> None:
    put(shared, A, *range(4))
    put(shared, B, *range(20))
    shared.store.flush()
    shared.open(max_bytes=ROOM * SIZE)
    put(shared, B, *range(20, 40))
    assert numbers(shared, A) == [0, 1, 2, 3]


def test_a_model_that_nobody_uses_any_more_has_no_share(shared: Tier) -> None:
    put(shared, A, *range(4))
    put(shared, B, 0)
    shared.now += IN_USE_S + 1
    put(shared, B, *range(1, ROOM))
    assert numbers(shared, A) == []
    assert numbers(shared, B) == list(range(ROOM))


def test_blocks_and_states_of_a_model_have_one_share(shared: Tier) -> None:
    root = namespace_root(fingerprint="a", kv_bits=16, kv_group_size=64, block_size=16)
    states = state_namespace(root, ["float32 4"]).hex()
    put(shared, root.hex(), *range(30))
    put(shared, states, *range(30))
    put(shared, B, *range(30))
    assert len(numbers(shared, B)) == ROOM // 2


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
