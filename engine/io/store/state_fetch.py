"""Fetching a prefix of a model with recurrent state: blocks, and the state at their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.io.store.block_fetch import Payload
from engine.plan import Cancellation, FoundState, StateSearch


class PrefixSource(Protocol):
    """The operations of `StoreClient` that this needs. Every answer comes once, on the
    IO thread."""

    def count_blocks(self, hashes: Sequence[bytes], on_done: Callable[[int | None], None]) -> None:
        """Ask how many of ``hashes`` are there without a gap."""

    def find_state(self, hashes: Sequence[bytes], on_done: Callable[[int | None], None]) -> None:
        """Ask for the position of the last of ``hashes`` whose state is there."""

    def get_state(self, hash: bytes, on_done: Callable[[list[Payload]], None]) -> None:
        """Fetch one state."""

    def get_blocks(
        self,
        hashes: Sequence[bytes],
        on_done: Callable[[list[Payload]], None],
        cancellation: Cancellation | None = None,
    ) -> None:
        """Fetch a run of blocks."""


class StatePrefixFetch:
    """One fetch of blocks and of the last state that they reach.

    Blocks after that state would be read for nothing. The kvstore is therefore asked first how many
    blocks there are, then for the last state among them; then the state is read, and the blocks
    before it. If a state is bad or gone, the one before it is used.
    """

    def __init__(
        self,
        source: PrefixSource,
        ticket: int,
        hashes: Sequence[bytes],
        states: StateSearch,
        on_fetched: Callable[[int, list[Payload], FoundState | None], None],
        cancellation: Cancellation | None = None,
    ) -> None:
        self._source = source
        self._cancellation = cancellation
        self._ticket = ticket
        self._hashes = hashes
        self._states = states
        self._on_fetched = on_fetched
        self._ram_count = 0  # the best state in RAM
        self._reach = 0  # count up to which blocks are there

    def start(self) -> None:
        if self._hashes:
            self._source.count_blocks(self._hashes, self._on_counted)
        else:
            self._on_counted(0)

    def _on_counted(self, blocks: int | None) -> None:
        self._reach = self._states.num_ready + (blocks or 0)
        reached = (count for count in self._states.in_ram if count <= self._reach)
        self._ram_count = max(reached, default=0)
        self._find()

    def _find(self) -> None:
        hashes = self._states.hashes[self._ram_count : self._reach]
        if hashes:
            self._source.find_state(hashes, self._on_found)
        else:
            self._on_found(None)

    def _on_found(self, position: int | None) -> None:
        if position is None or not self._ram_count <= self._ram_count + position < self._reach:
            self._get_blocks(self._ram_count, None)
            return
        count = self._ram_count + position + 1

        def done(payloads: list[Payload]) -> None:
            if payloads:
                self._get_blocks(count, FoundState(count, payloads[0]))
            else:
                self._reach = count - 1
                self._find()

        self._source.get_state(self._states.hashes[count - 1], done)

    def _get_blocks(self, end: int, state: FoundState | None) -> None:
        missing = self._hashes[: max(0, end - self._states.num_ready)]

        def done(payloads: list[Payload]) -> None:
            self._on_fetched(self._ticket, payloads, state)

        if missing:
            self._source.get_blocks(missing, done, self._cancellation)
        else:
            done([])
