"""The kvstore behind two ranks: what counts is what both have."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import zmq

from engine.io.store.block_fetch import FileKind, Payload
from engine.io.store.client import StoreClient
from engine.io.store.group_store import CONNECTING_S, GroupStore, open_channel
from engine.io.store.rank_store import RankStore, connect_channel
from engine.parallel.errors import RankFailed
from engine.parallel.plans import StoredName
from engine.plan import FoundPart, FoundState, PartSearch, StateSearch
from shared.hashing import rank_namespace
from tests.engine.io.storing_engine import new_namespace, running_kvstore
from tests.kvstore.blocks import hash_of, payload_of, wait_until
from tests.kvstore.process import Process

PATIENCE_S = 60.0


class Ranks:
    """Rank 0 with its store and a thread for it, and the store of rank 1."""

    def __init__(self, endpoint: str, channel: str, blocks: str | None = None) -> None:
        """``blocks`` is the namespace of rank 0, by default a new one."""
        self.blocks, self.states = blocks or new_namespace(), new_namespace()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pool = ThreadPoolExecutor(2)
        self.fetched: SimpleQueue[tuple[int, list[Payload], Any]] = SimpleQueue()
        self.not_stored: list[tuple[bytes, bool]] = []
        self.released: deque[StoredName] = deque()
        self.endpoint = endpoint
        self.own = self.client(0, lambda _: None)
        self.leader = GroupStore(
            self.own,
            open_channel(self.context, channel),
            2,
            self.released.append,
            on_fetched=lambda *found: self.fetched.put(found),
            on_stores_answered=self.not_stored.extend,
            wake=lambda: None,
        )
        self.other = RankStore(
            connect_channel(self.context, channel, 1),
            lambda store: self.client(1, store.not_stored),
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Let both serve, and wait until they have the kvstore."""
        self.other.start()
        self._thread.start()
        wait_until(lambda: self.leader.is_ready)

    def client(
        self, rank: int, on_stores_answered: Callable[[list[tuple[bytes, bool]]], None]
    ) -> StoreClient:
        return StoreClient(
            self.context,
            self.endpoint,
            FileKind(rank_namespace(self.blocks, rank)),
            self.pool,
            lambda *_: None,
            wake=lambda: None,
            states=FileKind(rank_namespace(self.states, rank)),
            on_stores_answered=on_stores_answered,
        )

    def store(self, numbers: list[int], *, ranks: tuple[int, ...] = (0, 1), state: bool) -> None:
        """Store the parts of ``ranks``, each with a content of its own."""
        for number in numbers:
            if 0 in ranks:
                assert self.leader.store(hash_of(number), payload_of(number), state)
            if 1 in ranks:
                name = StoredName(hash_of(number), state)
                self.other.store(name, payload_of(100 + number))
        if ranks == (0, 1):
            wait_until(lambda: self.leader.num_stores_under_way == 0)

    def fetch(self, numbers: list[int], *, states: bool = False) -> tuple[int, FoundState | None]:
        """Return how many blocks came, and the state."""
        hashes = [hash_of(number) for number in numbers]
        search = StateSearch(hashes, 0) if states else None
        self.leader.fetch(1, hashes, search)
        _, payloads, state = self.fetched.get(timeout=PATIENCE_S)
        for number, payload in zip(numbers, payloads, strict=False):
            assert payload == payload_of(number)
            assert self.other.fetched(StoredName(hash_of(number), False)) == payload_of(
                100 + number
            )
        return len(payloads), state

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in self.leader.sockets:
            poller.register(each, zmq.POLLIN)
        while not self._stop.is_set():
            poller.poll(20)
            self.leader.on_readable()
            self.leader.tick(time.monotonic())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.other.stop()
        self.context.destroy(0)
        self.pool.shutdown()


@pytest.fixture(scope="module")
def kvstore() -> Iterator[Process]:
    """A kvstore that acknowledges a block once it can be fetched."""
    with running_kvstore("--ssd-durability", "persistent") as process:
        yield process


@pytest.fixture
def ranks(kvstore: Process, socket_dir: Path) -> Iterator[Ranks]:
    kvstore.revive()
    ranks = Ranks(kvstore.endpoint, f"ipc://{socket_dir}/channel")
    ranks.start()
    yield ranks
    ranks.close()


def test_what_one_rank_lacks_is_a_miss_for_all(kvstore: Process, ranks: Ranks) -> None:
    ranks.store([1, 2, 3], state=False)
    assert ranks.fetch([1, 2, 3]) == (3, None)
    kvstore.corrupt(2, rank_namespace(ranks.blocks, 1))
    assert ranks.fetch([1, 2, 3]) == (1, None)
    kvstore.corrupt(1, ranks.blocks)
    assert ranks.fetch([1, 2, 3]) == (0, None)


def test_a_fetch_of_a_new_group_waits_until_its_ranks_have_the_kvstore(
    kvstore: Process, ranks: Ranks, socket_dir: Path
) -> None:
    ranks.store([1, 2], state=False)
    again = Ranks(kvstore.endpoint, f"ipc://{socket_dir}/again", ranks.blocks)
    again.leader.fetch(1, [hash_of(1), hash_of(2)])
    again.leader.tick(time.monotonic())
    again.start()
    _, payloads, _ = again.fetched.get(timeout=PATIENCE_S)
    again.close()
    for number, payload in zip((1, 2), payloads, strict=True):
        assert payload == payload_of(number)


def test_a_fetch_is_a_miss_where_a_rank_never_has_the_kvstore(
    kvstore: Process, socket_dir: Path
) -> None:
    alone = Ranks(kvstore.endpoint, f"ipc://{socket_dir}/channel")
    alone.leader.fetch(1, [hash_of(1)])
    alone.leader.tick(time.monotonic())
    assert alone.fetched.empty()
    alone.leader.tick(time.monotonic() + 2 * CONNECTING_S)
    assert alone.fetched.get_nowait() == (1, [], None)
    alone.start()
    alone.close()


def test_the_state_is_the_last_one_that_all_ranks_have(ranks: Ranks) -> None:
    ranks.store([1, 2, 3, 4], state=False)
    ranks.store([2], state=True)
    ranks.store([3], ranks=(0,), state=True)
    ranks.store([4], ranks=(1,), state=True)
    wait_until(lambda: ranks.own.stats.writes == 6)
    count, state = ranks.fetch([1, 2, 3, 4], states=True)
    assert count == 2 and state is not None and state.end == 2
    assert ranks.other.fetched(StoredName(hash_of(2), True)) == payload_of(102)


def test_a_part_of_a_page_is_one_that_all_ranks_have(ranks: Ranks) -> None:
    ranks.store([3, 4], state=False)
    ranks.store([5], ranks=(0,), state=False)
    wait_until(lambda: ranks.own.stats.writes == 3)
    hashes = [hash_of(number) for number in (1, 2, 3, 4, 5, 6)]
    ranks.leader.fetch(1, hashes[2::3], PartSearch(hashes, 3))
    _, payloads, part = ranks.fetched.get(timeout=PATIENCE_S)
    assert payloads == [payload_of(3)] and part == FoundPart(1, payload_of(4))
    assert ranks.other.fetched(StoredName(hash_of(4), False)) == payload_of(104)


def test_what_rank_0_drops_the_others_drop(ranks: Ranks) -> None:
    ranks.store([1, 2], state=False)
    ranks.fetch([1, 2])
    ranks.fetch([1])
    wait_until(lambda: gc.collect() >= 0 and len(ranks.released) == 3)
    names = sorted(ranks.released)
    assert names == [StoredName(hash_of(number), False) for number in (1, 1, 2)]
    ranks.other.release(names[:2])
    assert ranks.other.fetched(names[2]) == payload_of(102)
    with pytest.raises(RankFailed):
        ranks.other.fetched(names[0])


def test_what_another_rank_could_not_store_is_offered_again(kvstore: Process, ranks: Ranks) -> None:
    kvstore.end()
    wait_until(lambda: not ranks.leader.is_ready)
    assert ranks.leader.room().files == 0
    wait_until(lambda: not ranks.own.is_ready)
    ranks.store([7], ranks=(1,), state=False)
    wait_until(lambda: ranks.not_stored == [(hash_of(7), False)])
