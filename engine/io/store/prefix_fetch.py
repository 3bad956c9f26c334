"""Fetching a prefix: blocks, and the state or the part of a page at their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from engine.io.store.block_fetch import Payload
from engine.plan import Cancellation, FoundPart, FoundState, PartSearch, StateSearch

OnFetched = Callable[[int, list[Payload], FoundState | FoundPart | None], None]
"""Called with the ticket of a fetch, its blocks, and what was found at their end."""


class PrefixSource(Protocol):
    """The operations of `StoreClient` that this needs. Every answer comes once, on the
    IO thread."""

    def count_blocks(self, hashes: Sequence[bytes], on_done: Callable[[int | None], None]) -> None:
        """Ask how many of ``hashes`` are there without a gap."""

    def find_last(
        self, hashes: Sequence[bytes], on_done: Callable[[int | None], None], *, are_states: bool
    ) -> None:
        """Ask for the position of the last of ``hashes`` that is there as a block, or state."""

    def get_state(self, hash: bytes, on_done: Callable[[list[Payload]], None]) -> None:
        """Fetch one state."""

    def get_blocks(
        self,
        hashes: Sequence[bytes],
        on_done: Callable[[list[Payload]], None],
        cancellation: Cancellation | None = None,
    ) -> None:
        """Fetch a run of blocks."""


def start_of(
    source: PrefixSource,
    ticket: int,
    hashes: Sequence[bytes],
    end: StateSearch | PartSearch | None,
    on_fetched: OnFetched,
    cancellation: Cancellation | None = None,
) -> Callable[[], None]:
    """Return a function that starts a fetch of blocks, and of what is at their ``end``."""
    if isinstance(end, StateSearch):
        return StatePrefixFetch(source, ticket, hashes, end, on_fetched, cancellation).start

    def on_pages(payloads: list[Payload]) -> None:
        """Fetch the part of the page after the last one that was found, if there is one."""
        size = end.page_blocks if end else 1
        blocks = end.hashes[len(payloads) * size :][: size - 1] if end else []

        def found(position: int | None) -> None:
            if position is None or not 0 <= position < len(blocks):
                on_fetched(ticket, payloads, None)
            else:
                source.get_blocks([blocks[position]], partial(done, position + 1))

        def done(count: int, part: list[Payload]) -> None:
            on_fetched(ticket, payloads, FoundPart(count, part[0]) if part else None)

        if blocks:
            source.find_last(blocks, found, are_states=False)
        else:
            found(None)

    return partial(source.get_blocks, hashes, on_pages, cancellation)


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
        on_fetched: OnFetched,
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
            self._source.find_last(hashes, self._on_found, are_states=True)
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
