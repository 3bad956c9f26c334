"""A transport whose client must read."""

from __future__ import annotations

import asyncio
from typing import Any

from router.http.client_timer import ClientTimer

CLOSE_TIMEOUT_S = 10.0
"""Time limit for sending the last bytes after `close`."""
MIN_PROGRESS_BYTES = 16 * 1024
"""Number of bytes that a client must read in that time, if it does not read all."""


class DrainingTransport:
    """A transport that is aborted if its client stops reading.

    `close` alone waits until the client has read all buffered data: a client that never reads could
    keep its descriptor and buffer for as long as it likes.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._timer: ClientTimer | None = None
        self._buffered_bytes = 0
        self._lost = False
        self.write = transport.write  # called for every token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._transport.close()
        self._timeout_s = min(self._timeout_s, CLOSE_TIMEOUT_S)
        self._stop_watching()
        if not self._lost:
            self.watch()

    def watch(self) -> None:
        """Abort unless the buffer shrinks."""
        if self._timer is None:
            self._buffered_bytes = self._transport.get_write_buffer_size()
            self._timer = ClientTimer(self._loop, self._timeout_s, self._check)

    def lost(self) -> None:
        """Record that the connection is gone."""
        self._lost = True
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if left and left > self._buffered_bytes - MIN_PROGRESS_BYTES:
            self._transport.abort()
        elif left:
            self.watch()
