"""Prefixes of models with recurrent layers that survive their engine in a kvstore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import cast

import pytest

from engine.io.inbox import BlocksFetched, Inbox
from engine.io.store.block_fetch import Payload
from engine.io.store.client import StoreClient
from engine.io.store.prefix_fetch import StatePrefixFetch
from engine.plan import Cancellation, StateSearch, StoreRoom
from tests.engine.replica.test_state_prefixes import KINDS, Observed
from tests.engine.whole import random_tokens


class Stored(Observed):
    """Goes on while answers of the kvstore are on their way."""

    def run(self) -> None:
        while self.turn() or not self.scheduler.idle:
            pass


class MemoryStore:
    """A kvstore that keeps the bytes of blocks and states in memory, and answers at once."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Payload] = {}
        self.states: dict[bytes, Payload] = {}
        self.inbox = Inbox()

    def attach(self, whole: Stored) -> None:
        whole.core._store = cast(StoreClient, self)
        self.inbox = whole.core._inbox

    def fetch(
        self,
        ticket: int,
        hashes: list[bytes],
        states: StateSearch | None,
        cancellation: Cancellation,
    ) -> None:
        assert states is not None
        answer = lambda *fetched: self.inbox.put(BlocksFetched(*fetched))  # noqa: E731
        StatePrefixFetch(self, ticket, hashes, states, answer, cancellation).start()

    def store(self, hash: bytes, payload: Sequence[bytes | memoryview], is_state: bool) -> bool:
        kept = self.states if is_state else self.blocks
        kept.setdefault(hash, tuple(memoryview(bytes(buffer)) for buffer in payload))
        return True

    def room(self) -> StoreRoom:
        return StoreRoom(256, 2**28)

    def touch(self, blocks: Sequence[bytes], states: Sequence[bytes] = ()) -> None:
        assert all(block in self.blocks for block in blocks)

    def count_blocks(self, hashes: Sequence[bytes], on_done: Callable[[int | None], None]) -> None:
        on_done(len(list(takewhile(self.blocks.__contains__, hashes))))

    def find_last(
        self, hashes: Sequence[bytes], on_done: Callable[[int | None], None], *, are_states: bool
    ) -> None:
        assert are_states
        found = [position for position, hash in enumerate(hashes) if hash in self.states]
        on_done(max(found, default=None))

    def get_state(self, hash: bytes, on_done: Callable[[list[Payload]], None]) -> None:
        on_done([self.states[hash]])

    def get_blocks(
        self,
        hashes: Sequence[bytes],
        on_done: Callable[[list[Payload]], None],
        cancellation: Cancellation | None = None,
    ) -> None:
        on_done([self.blocks[hash] for hash in hashes])


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Stored:
    return Stored(
        tiny_model(request.param), kvstore_socket=("ipc:///nowhere",), ssd_policy="write_through"
    )


def restart(whole: Stored, store: MemoryStore, look_ahead: bool) -> None:
    """Give ``whole`` the memory of a new process, with ``store``."""
    whole.renew(look_ahead)
    whole.forget()
    store.attach(whole)


def test_after_a_restart_the_next_turn_computes_only_what_is_new(whole: Stored) -> None:
    """Whether steps are dispatched ahead of their results or in turn."""
    store = MemoryStore()
    restart(whole, store, look_ahead=False)
    prompt = random_tokens(11, 100)
    said = whole.serve("first", prompt, max_tokens=40)
    assert store.states and bool(store.blocks) == whole.scheduler.config.keeps_kv
    restart(whole, store, look_ahead=True)
    turn = [*prompt, *said, *random_tokens(12, 9)]
    whole.serve("second", turn)
    whole.assert_right()
    assert whole.reused("second") == 0
    assert whole.usage("second").cached_ssd_tokens >= (len(turn) - 9 - 1) // whole.unit * whole.unit
    restart(whole, store, look_ahead=False)
    del store.states[next(reversed(store.states))]  # the one at the end of the last answer
    whole.serve("again", turn)
    whole.assert_right()


def test_states_that_leave_memory_are_stored(whole: Stored) -> None:
    store = MemoryStore()
    restart(whole, store, look_ahead=False)
    config = whole.scheduler.config
    object.__setattr__(config, "store_policy", "evict_only")
    whole.scheduler.memory._evicting_exports = True
    try:
        whole.serve("first", random_tokens(13, 90))
        assert not store.states
        memory = whole.scheduler.memory
        while memory.snapshots.num_evictable:
            memory._evict_snapshot()
        whole.serve("second", random_tokens(14, 40))
        assert store.states
    finally:
        object.__setattr__(config, "store_policy", "write_through")
