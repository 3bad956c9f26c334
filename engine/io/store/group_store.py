"""The kvstore from the view of rank 0 of several: a block counts only if every rank has it.

Each rank has its own client and files. Rank 0 asks all of them the same, and takes the smallest
answer; if a rank fails to read a block, it is a miss for all. The other ranks keep what they fetch
until a plan inserts it, by name, or says that rank 0 has dropped it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec
import zmq

from engine.io.store import rank_messages
from engine.io.store.block_fetch import Payload
from engine.io.store.client import StoreClient
from engine.io.store.prefix_fetch import OnFetched, start_of
from engine.io.store.rank_messages import Answer, StoreState, ToRank
from engine.io.store.stats import StoreClientStats
from engine.parallel.plans import StoredName, rank_name
from engine.plan import Cancellation, PartSearch, StateSearch, StoreRoom
from shared.network.curve import KeyPair

CONNECTING_S = 5.0
"""How long the first fetches wait for the other ranks. The first requests after a restart of the
group come immediately, and a rank may be ready a second after rank 0."""


class EngineStore(Protocol):
    """The part of the kvstore client that an engine uses. `StoreClient` describes the methods."""

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """Sockets for which the IO thread waits."""

    @property
    def stats(self) -> StoreClientStats: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def num_stores_under_way(self) -> int: ...
    def fetch(
        self,
        ticket: int,
        hashes: Sequence[bytes],
        end: StateSearch | PartSearch | None,
        cancellation: Cancellation,
    ) -> None: ...
    def store(
        self, hash: bytes, payload: Sequence[bytes | memoryview], is_state: bool = False
    ) -> bool: ...
    def room(self) -> StoreRoom: ...
    def touch(self, blocks: Sequence[bytes], states: Sequence[bytes] = ()) -> None: ...
    def clear(self) -> None: ...
    def tick(self, now: float) -> None: ...
    def on_readable(self) -> None: ...


class GroupStore:
    """The clients of all ranks as one. See `StoreClient` for the methods and their threads."""

    def __init__(
        self,
        own: StoreClient,
        others: zmq.Socket[bytes],
        size: int,
        released: Callable[[StoredName], object],
        on_fetched: OnFetched,
        on_stores_answered: Callable[[list[tuple[bytes, bool]]], None],
        wake: Callable[[], None],
    ) -> None:
        """``others`` is a ROUTER socket to which the other ranks connect. ``released`` is called,
        on any thread, for each file of a fetch that nothing on this rank refers to any more."""
        self._own, self._others = own, others
        self.sockets = own.socket, others
        self._released = released
        self._on_fetched, self._on_stores_answered = on_fetched, on_stores_answered
        self._wake = wake
        self._names = [rank_name(rank) for rank in range(1, size)]
        self._states: dict[bytes, StoreState] = {}
        self._tickets = count(1)
        self._questions: dict[int, _Question] = {}
        self._actions: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._num_stored = 0
        self._connecting_until: float | None = time.monotonic() + CONNECTING_S
        """None once all ranks have connected to the kvstore, or had the time to."""
        self._early: list[Callable[[], object]] = []

    @property
    def stats(self) -> StoreClientStats:
        """The figures of this rank."""
        return self._own.stats

    @property
    def is_ready(self) -> bool:
        states = list(self._states.values())
        all_there = len(states) == len(self._names) and all(each.is_ready for each in states)
        return all_there and self._own.is_ready

    @property
    def num_stores_under_way(self) -> int:
        """Totals of all ranks, including what a rank has yet to export."""
        others = sum(
            state.under_way + max(0, self._num_stored - state.stored)
            for state in list(self._states.values())
        )
        return self._own.num_stores_under_way + others

    def fetch(
        self,
        ticket: int,
        hashes: Sequence[bytes],
        end: StateSearch | PartSearch | None = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        """A cancelled fetch is read to its end: each rank reads its own files."""

        def start() -> None:
            if self._connecting_until is not None:
                self._early.append(start)
            elif len(self._states) < len(self._names):
                self._on_fetched(ticket, [], None)  # a rank has not connected yet
            else:
                start_of(self, ticket, hashes, end, self._on_fetched)()

        self._post(start)

    def store(
        self, hash: bytes, payload: Sequence[bytes | memoryview], is_state: bool = False
    ) -> bool:
        """Send this rank's part. The other ranks send theirs because the plan has named it."""
        self._num_stored += 1
        return self._own.store(hash, payload, is_state)

    def room(self) -> StoreRoom:
        others = (StoreRoom(each.files, each.size_bytes) for each in list(self._states.values()))
        rooms = [self._own.room(), *others]
        if not self.is_ready:
            return StoreRoom(0, 0)
        return StoreRoom(min(room.files for room in rooms), min(room.size_bytes for room in rooms))

    def touch(self, blocks: Sequence[bytes], states: Sequence[bytes] = ()) -> None:
        self._own.touch(blocks, states)
        if blocks or states:
            message = rank_messages.TouchFiles(list(blocks), list(states))
            self._post(lambda: self._send_to_all(message))

    def clear(self) -> None:
        self._own.clear()
        self._post(lambda: self._send_to_all(rank_messages.ClearFiles()))

    def tick(self, now: float) -> None:
        self._own.tick(now)
        if (until := self._connecting_until) is not None and (self.is_ready or now > until):
            self._connecting_until = None
            while self._early:
                self._early.pop(0)()
        with suppress(Empty):
            while True:
                self._actions.get_nowait()()

    def on_readable(self) -> None:
        self._own.on_readable()
        while True:
            try:
                name, content = self._others.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match rank_messages.from_rank.decode(content):
                case Answer(ticket=ticket, value=value):
                    self._add_answer(ticket, value)
                case StoreState() as state:
                    self._states[name] = msgspec.structs.replace(state, not_stored=[])
                    refused = [(each.hash, each.is_state) for each in state.not_stored]
                    self._on_stores_answered(refused)

    # -- asking all ranks, on the IO thread: a `PrefixSource` -------------------

    def count_blocks(self, hashes: Sequence[bytes], on_done: Callable[[int | None], None]) -> None:
        ticket = self._ask(lambda answers: on_done(_least(answers)))
        self._send_to_all(rank_messages.CountBlocks(ticket, list(hashes)))
        self._own.count_blocks(hashes, lambda found: self._add_answer(ticket, found))

    def find_last(
        self, hashes: Sequence[bytes], on_done: Callable[[int | None], None], *, are_states: bool
    ) -> None:
        """The last one that all ranks have: each answer narrows the search of the next rank."""

        def answered(answers: list[int | None]) -> None:
            last = _least(answers) if None not in answers else None
            if last is None or all(answer == last for answer in answers):
                on_done(last)
            else:
                self.find_last(hashes[: last + 1], on_done, are_states=are_states)

        ticket = self._ask(answered)
        self._send_to_all(rank_messages.FindLastFile(ticket, list(hashes), are_states))
        answer = partial(self._add_answer, ticket)
        self._own.find_last(hashes, answer, are_states=are_states)

    def get_blocks(
        self,
        hashes: Sequence[bytes],
        on_done: Callable[[list[Payload]], None],
        cancellation: Cancellation | None = None,
    ) -> None:
        self._get(hashes, False, on_done)

    def get_state(self, hash: bytes, on_done: Callable[[list[Payload]], None]) -> None:
        self._get([hash], True, on_done)

    def _get(
        self, hashes: Sequence[bytes], are_states: bool, on_done: Callable[[list[Payload]], None]
    ) -> None:
        fetched: list[Payload] = []

        def answered(answers: list[int | None]) -> None:
            count = _least(answers) or 0
            self._send_to_all(rank_messages.KeepFetched(ticket, count))
            for hash, payload in zip(hashes, fetched[:count], strict=False):
                weakref.finalize(payload[0], self._released, StoredName(hash, are_states))
            on_done(fetched[:count])

        def own_done(payloads: list[Payload]) -> None:
            fetched.extend(payloads)
            self._add_answer(ticket, len(payloads))

        ticket = self._ask(answered)
        self._send_to_all(rank_messages.FetchFiles(ticket, list(hashes), are_states))
        if are_states:
            self._own.get_state(hashes[0], own_done)
        else:
            self._own.get_blocks(hashes, own_done)

    def _ask(self, on_done: Callable[[list[int | None]], None]) -> int:
        ticket = next(self._tickets)
        self._questions[ticket] = _Question(on_done)
        return ticket

    def _add_answer(self, ticket: int, value: int | None) -> None:
        question = self._questions[ticket]
        question.answers.append(value)
        if len(question.answers) > len(self._names):
            del self._questions[ticket]
            question.on_done(question.answers)

    def _send_to_all(self, message: ToRank) -> None:
        """A rank that is gone never answers: the group, and with it this process, then ends."""
        content = rank_messages.encode(message)
        for name in self._names:
            with suppress(zmq.ZMQError):
                self._others.send_multipart([name, content], zmq.NOBLOCK)

    def _post(self, action: Callable[[], object]) -> None:
        self._actions.put(action)
        self._wake()


@dataclass
class _Question:
    on_done: Callable[[list[int | None]], None]
    answers: list[int | None] = field(default_factory=list)


def _least(answers: Sequence[int | None]) -> int | None:
    return min(answer or 0 for answer in answers)


def open_channel(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: KeyPair | None = None
) -> zmq.Socket[bytes]:
    """Return rank 0's socket for `GroupStore`, bound to ``address``. ``keys`` are for tcp."""
    channel = context.socket(zmq.ROUTER)
    channel.set(zmq.LINGER, 0)
    channel.set(zmq.SNDHWM, 0)  # the fetches limit what is in flight
    channel.set(zmq.RCVHWM, 0)
    if keys is not None:
        keys.guard(channel)
    channel.bind(address)
    return channel
