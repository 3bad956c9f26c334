"""The queue of requests for adapters: who gets a place, when, and what without memory."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.adapters.checkpoint import LowRank, Shape, read
from engine.adapters.places import AdapterPlaces
from engine.adapters.queue import (
    SWAP_SHARE,
    AdapterQueue,
    AdapterRead,
    AdapterReader,
)
from shared import wire
from shared.wire.parts import BACKGROUND_PRIORITY
from tests.engine.adapters.random_adapters import random_adapter
from tests.shared.submits import submit

SHAPES = {"model.layers.0.self_attn.q_proj": Shape(8, 6), "model.layers.0.mlp.up": Shape(8, 20)}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Store:
    """Records what is put where. Each adapter takes ``put_s``."""

    def __init__(self, clock: Clock) -> None:
        self.places: dict[int, int] = {}  # the factors of each place
        self.failure: Exception | None = None
        self.put_s = 0.0
        self._clock = clock

    def put(self, place: int, layers: Mapping[str, LowRank]) -> None:
        if self.failure is not None:
            raise self.failure
        self._clock.now_s += self.put_s
        self.places[place] = sum(one.down.size + one.up.size for one in layers.values())


@dataclass(eq=False)
class Waiter:
    """In place of a sequence."""

    request: wire.Submit
    is_finished: bool = False

    @property
    def name(self) -> str:
        return self.request.request_id


class Queue:
    """A queue with its own thread and ``count`` places."""

    def __init__(self, folder: Path, count: int) -> None:
        self.clock = Clock()
        self.store = Store(self.clock)
        self.places = AdapterPlaces(SHAPES, count, max_rank=4)
        self.places.store = self.store
        self._done: queue.SimpleQueue[AdapterRead] = queue.SimpleQueue()
        reader = AdapterReader(SHAPES, 4, self._done.put)
        self.queue = AdapterQueue[Waiter](self.places, reader, self.clock)
        self.running: dict[str, tuple[Waiter, int]] = {}
        self._folder = folder
        self._paths: dict[str, Path] = {}

    def ask(self, name: str, adapter: str, *, batch: bool = False) -> Waiter:
        if adapter not in self._paths:
            seed = len(self._paths)
            self._paths[adapter] = random_adapter(SHAPES, self._folder / adapter, seed)
        path = self._paths[adapter]
        found = wire.AdapterRef(
            name=adapter, path=str(path), digest=read(path, SHAPES, 4).digest, rank=4
        )
        priority = BACKGROUND_PRIORITY if batch else 0
        waiter = Waiter(submit(name, adapter=found, priority=priority))
        self._note(waiter, self.queue.find(waiter))
        return waiter

    def turn(self, *, read: int = 0) -> list[wire.Refused]:
        """Take in so many adapters that were read, and run the queue as the engine does."""
        for _ in range(read):
            assert not self.queue.on_read(self._done.get(timeout=20))
        used = {place for _, place in self.running.values()}
        needed = {place for one, place in self.running.values() if not one.request.is_background}
        refused = []
        for waiter, found in self.queue.take(used, used - needed):
            refused += self._note(waiter, found)
        if self.queue.wanted_place is not None:
            for name, (waiter, place) in list(self.running.items()):
                if place == self.queue.wanted_place:
                    del self.running[name]
                    self._note(waiter, self.queue.find(waiter))
        return refused

    def _note(self, waiter: Waiter, found: int | wire.Refused | None) -> list[wire.Refused]:
        if isinstance(found, int):
            self.running[waiter.name] = waiter, found
        return [found] if isinstance(found, wire.Refused) else []


def test_requests_of_batches_give_their_place_back_and_wait_for_it_behind_all_others(
    tmp_path: Path,
) -> None:
    asked = Queue(tmp_path, 2)
    for number, name in enumerate("ab"):
        asked.ask(name, name, batch=True)
        asked.turn(read=1)
        asked.clock.now_s += 60 * (number + 1)
    asked.ask("line", "c", batch=True)
    asked.turn(read=1)
    assert asked.running.keys() == {"a", "b"}  # one batch does not take the place of another
    asked.ask("chat", "d")
    asked.turn(read=1)
    assert asked.running.keys() == {"b"}
    asked.turn()
    assert asked.running.keys() == {"b", "chat"}
    asked.running.pop("chat")
    asked.clock.now_s += 60
    asked.turn(read=1)
    assert asked.running.keys() == {"b", "line"}
    asked.running.clear()
    asked.turn()
    assert asked.running.keys() == {"a"}


def test_requests_that_run_keep_their_places(tmp_path: Path) -> None:
    asked = Queue(tmp_path, 1)
    asked.ask("first", "a")
    asked.turn(read=1)
    asked.ask("chat", "b")
    asked.clock.now_s += 60
    asked.turn(read=1)
    assert asked.running.keys() == {"first"} and asked.queue.wanted_place is None


def test_swaps_take_a_share_of_the_time_while_other_requests_run(tmp_path: Path) -> None:
    asked = Queue(tmp_path, 2)
    asked.store.put_s = 1.0
    asked.running["other"] = Waiter(submit("other")), 0
    waits = []
    for number, adapter in enumerate("ababcacb"):
        asked.ask(f"r{number}", adapter)
        began = asked.clock.now_s
        if f"r{number}" not in asked.running:
            asked.turn(read=1)
        while f"r{number}" not in asked.running:
            asked.clock.now_s += 0.25
            asked.turn()
        waits.append(asked.clock.now_s - began)
        asked.running.pop(f"r{number}")
    pause_s = (1 - SWAP_SHARE) / SWAP_SHARE
    assert waits[2] == waits[3] == 0  # loaded adapters wait for nothing
    assert all(pause_s < wait < pause_s + 2 for wait in (waits[4], waits[7]))
    assert waits[1] == 1.0  # so does a free place
    asked.running.clear()  # nobody else is there
    began = asked.clock.now_s
    asked.ask("alone", "c" if asked.places.find(digest_of(asked, "c")) is None else "a")
    asked.turn(read=1)
    assert "alone" in asked.running and asked.clock.now_s == began + 1.0


def test_a_place_that_was_just_given_away_is_not_taken_back(tmp_path: Path) -> None:
    asked = Queue(tmp_path, 1)
    asked.ask("line", "a", batch=True)
    asked.turn(read=1)
    asked.clock.now_s += 100  # swaps may go on
    gone = asked.ask("gone", "b")
    asked.queue.on_read(asked._done.get(timeout=20))
    assert not list(asked.queue.take({1}, {1})) and asked.queue.wanted_place == 1
    asked.ask("same", "a")  # waits behind
    gone.is_finished = True
    asked.ask("other", "b")
    ((placed, place),) = asked.queue.take({1}, {1})
    assert placed.name == "same" and place == 1
    assert asked.queue.wanted_place is None


def digest_of(asked: Queue, adapter: str) -> str:
    return read(asked._paths[adapter], SHAPES, 4).digest


def test_an_adapter_without_memory_is_tried_elsewhere_and_leaves_its_place_free(
    tmp_path: Path,
) -> None:
    asked = Queue(tmp_path, 1)
    asked.store.failure = MemoryError("no memory")
    asked.ask("r", "a")
    (refused,) = asked.turn(read=1)
    assert refused.reason == "full"  # so the router sends it again, here or to another engine
    assert "no memory for an adapter of 0.0 MB, though 0.0 MB are reserved" in refused.message
    assert not asked.running and not asked.queue.is_waiting
    asked.store.failure = None
    asked.ask("r", "a")
    if "r" not in asked.running and not asked.turn():
        asked.turn(read="r" not in asked.running)
    assert asked.running.keys() == {"r"}


@pytest.mark.parametrize(("rank", "columns"), [(1, 2), (4, 4), (16, 16), (20, 32)])
def test_the_reserved_memory_holds_all_places_and_what_is_read_ahead(
    rank: int, columns: int
) -> None:
    places = AdapterPlaces(SHAPES, 3, rank)
    numbers = sum(columns * (inputs + outputs) for inputs, outputs in SHAPES.values())
    assert places.reserved_bytes == 4 * (3 + 1 + 2) * numbers
