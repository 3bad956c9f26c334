"""Memory for bodies of requests while they are read and parsed, and the order in which they are
read."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.errors import Unavailable
from router.fair_shares import FairShares

_RETRY_AFTER_S = 2.0


class BodyBudget:
    """Counts the bytes of bodies that have arrived in part or are not parsed yet."""

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        """``limit_bytes`` follows the limit of one body, which models that load raise."""
        self._limit_bytes = limit_bytes
        self._used = FairShares()
        self._turns = _Turns()

    @property
    def used_bytes(self) -> int:
        return self._used.total

    @contextmanager
    def reading(self, share: str) -> Iterator[BodyBytes]:
        """Count the bytes of one body of ``share`` until the end of the block."""
        body = BodyBytes(self, share)
        try:
            yield body
        finally:
            body.release()

    def take(self, share: str, count: int) -> None:
        if not self._used.has_room(share, self._limit_bytes(), count):
            raise Unavailable(
                "The server is receiving too many large requests at once.",
                code="too_many_bodies",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._used.take(share, count)

    def give_back(self, share: str, count: int) -> None:
        self._used.give_back(share, count)

    async def turn(self, share: str) -> None:
        await self._turns.wait(share)


class _Turns:
    """Large bodies are read one piece after the other, one at each turn of the event loop.

    Otherwise the loop reads a piece of each connection that has one before it handles anything
    else: hundreds of connections would take a new client's time four times over, once for each turn
    that it needs from its connection to its answer. Shares go one after the other.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By share, the next one first."""
        self._is_running = False

    async def wait(self, share: str) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(share, deque()).append(turn)
        if not self._is_running:
            self._is_running = True
            loop.call_soon(self._next, loop)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            share, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[share] = queue
            if not turn.done():  # cancelled: its client has left
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._is_running = False


class BodyBytes:
    """The bytes of one body."""

    def __init__(self, budget: BodyBudget, share: str) -> None:
        self._budget, self._share = budget, share
        self._count = 0

    def add(self, count: int) -> None:
        """Raises `Unavailable`."""
        self._budget.take(self._share, count)
        self._count += count

    async def turn(self) -> None:
        """Wait until another piece of this body may be read."""
        await self._budget.turn(self._share)

    def release(self) -> None:
        self._budget.give_back(self._share, self._count)
        self._count = 0
