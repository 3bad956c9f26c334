"""The queue of messages from the IO thread to the main thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.adapters.queue import AdapterRead
from engine.plan import FoundPart, FoundState
from shared.wire import Abort, CheckAdapter, ClearCache, Drain, Encode, Grammar, Submit

if TYPE_CHECKING:  # the process starts its IO thread before it imports llguidance
    from engine.grammar.compiler import CompileOutcome


RequestKey = tuple[str, int]
"""The id and attempt of a request."""


@dataclass(frozen=True)
class NewRouter:
    """A router is gone, or another one has taken its place. Its own ``requests`` must be
    dropped, and the cached hashes sent again."""

    requests: frozenset[RequestKey]


@dataclass(frozen=True)
class BlocksFetched:
    """The kvstore's answer to a fetch."""

    ticket: int
    payloads: list[tuple[memoryview, ...]]
    """The longest run of blocks from the first hash on; may be empty."""
    end: FoundState | FoundPart | None = None


@dataclass(frozen=True)
class StoresAnswered:
    """The kvstore has room for more. ``not_stored`` has the hashes that it did not store, each
    with whether it is a state."""

    not_stored: list[tuple[bytes, bool]]


@dataclass(frozen=True)
class GrammarCompiled:
    """A grammar that was sent to the compiler has been compiled, or refused."""

    grammar: Grammar
    outcome: CompileOutcome


@dataclass(frozen=True)
class PicturedSubmit:
    """A request with pictures, and the bytes of their arrays."""

    request: Submit
    frames: tuple[bytes, ...]


InboxMessage = (
    Submit
    | PicturedSubmit
    | Encode
    | Abort
    | Drain
    | ClearCache
    | CheckAdapter
    | AdapterRead
    | NewRouter
    | BlocksFetched
    | StoresAnswered
    | GrammarCompiled
)


def with_frames(
    message: Submit | Encode | Abort | Drain | ClearCache | CheckAdapter, frames: Sequence[bytes]
) -> InboxMessage:
    """Return ``message``; a request with pictures is returned with ``frames``, the bytes of
    their arrays."""
    if isinstance(message, Submit) and message.images:
        return PicturedSubmit(message, tuple(frames))
    return message


class Inbox:
    """An unbounded queue: an engine refuses submits beyond a limit, and everything else is
    small."""

    def __init__(self) -> None:
        self._items: deque[InboxMessage] = deque()
        self._arrived = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: InboxMessage) -> None:
        with self._arrived:
            self._items.append(item)
            self._arrived.notify()

    def take(self, timeout_s: float | None = 0) -> list[InboxMessage]:
        """Return all messages. Wait up to ``timeout_s`` for the first one (None: forever)."""
        with self._arrived:
            if not self._items and timeout_s != 0:
                self._arrived.wait(timeout_s)
            items = list(self._items)
            self._items.clear()
            return items
