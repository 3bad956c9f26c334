"""A signal for one task."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes the waiting task. Like an `asyncio.Event` for one waiter that resets it.

    It is set and awaited once per token, and takes half as long as an event.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self.is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self.is_set = False

    async def wait(self) -> None:
        """Wait until the signal is set, and reset it."""
        if not self.is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self.is_set = False
