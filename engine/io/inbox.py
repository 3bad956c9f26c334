"""The queue from the IO thread to the main thread."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.wire import Abort, Drain, Grammar, Submit

if TYPE_CHECKING:
    from engine.grammar.compiler import CompileOutcome


@dataclass(frozen=True)
class NewRouter:
    """Another router than before: what the old one asked for is nobody's any more."""


@dataclass(frozen=True)
class BlocksFetched:
    """The kvstore's answer to a fetch: the longest run of blocks, maybe none."""

    ticket: int
    payloads: list[tuple[memoryview, ...]]


@dataclass(frozen=True)
class GrammarCompiled:
    """What became of a grammar."""

    grammar: Grammar
    outcome: CompileOutcome


InboxMessage = Submit | Abort | Drain | NewRouter | BlocksFetched | GrammarCompiled


class Inbox:
    """Bounded for submits by what the engine takes at once; the rest is small."""

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
        """All that is there; waits up to ``timeout_s`` (None: for ever) for the first."""
        with self._arrived:
            if not self._items and timeout_s != 0:
                self._arrived.wait(timeout_s)
            items = list(self._items)
            self._items.clear()
            return items
