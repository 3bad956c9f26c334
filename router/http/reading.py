"""Turns of an event loop for connections that send bodies.

A loop handles all connections that have data before it looks for others. Hundreds of clients that
each send a large body would make such a round last for as long as all of them take.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.flow_control import FlowControl

_AT_ONCE = 4
"""Connections that go on reading in one round. Each then gets up to 256 kB at once."""


class ReadingTurns:
    """Resumes connections in the order in which they ask, a few in each round of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` when it is its turn."""
        if not self._waiting:
            self._call_soon(self._next)
        self._waiting.append(resume)

    def _next(self) -> None:
        for _ in range(min(_AT_ONCE, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            self._call_soon(self._next)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, ReadingTurns] = WeakKeyDictionary()


class TurnFlow(FlowControl):
    """Makes a connection that paused wait for its turn."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(transport)
        self._turns = _turns.setdefault(loop, ReadingTurns(loop))
        self._waits = False

    def resume_reading(self) -> None:
        if self.read_paused and not self._waits:
            self._waits = True
            self._turns.wait(self._resume)

    def yield_reading(self) -> None:
        """Read nothing until all others that wait now had a turn."""
        self.pause_reading()
        self.resume_reading()

    def _resume(self) -> None:
        self._waits = False
        if not self._transport.is_closing():
            super().resume_reading()
