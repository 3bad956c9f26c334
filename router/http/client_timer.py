"""Time limits for clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SUSPENDED_S = 1.0


class ClientTimer:
    """Calls ``on_timeout`` once a client has had ``seconds``.

    If this process was suspended meanwhile (by a signal, or with its container), it has not seen
    what the client has done: the client gets the whole time again. While the machine sleeps, the
    loop's clock stands still.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, on_timeout: Callable[[], None]
    ) -> None:
        self._loop, self._seconds, self._on_timeout = loop, seconds, on_timeout
        self._start()

    def cancel(self) -> None:
        self._handle.cancel()

    def _start(self) -> None:
        self._due = self._loop.time() + self._seconds
        self._handle = self._loop.call_later(self._seconds, self._fire)

    def _fire(self) -> None:
        if self._loop.time() - self._due > _SUSPENDED_S:
            self._start()
        else:
            self._on_timeout()
