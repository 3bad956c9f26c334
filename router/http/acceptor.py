"""Accepts the connections of HTTP clients, and leaves descriptors for everything else.

Without a free descriptor, ZeroMQ ends the process: an engine that joins at an ``ipc://`` socket
then would be enough. Neither asyncio nor uvloop limits how many connections it accepts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from shared.descriptors import reserve
from shared.logs import RateLimitedLogger

_AT_ONCE = 32
"""Max connections accepted before other events are handled."""
_PAUSE_S = 1.0
_WARN_INTERVAL_S = 10.0

logger = logging.getLogger("router")


class Acceptor:
    """Accepts connections from ``listener`` on the running event loop until it is closed. Has those
    parts of `asyncio.Server` that uvicorn uses.

    ``max_descriptors`` is the process's limit. A connection for which only the descriptors of the
    reserve are left is closed at once, and ``on_refused`` is called.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol_factory: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        max_descriptors: int,
        on_refused: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._protocol_factory = protocol_factory
        self._tls = tls
        self._first_reserved = max_descriptors - reserve(max_descriptors)
        self._on_refused = on_refused
        self._warnings = RateLimitedLogger(logger, _WARN_INTERVAL_S)
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting. Accepted connections are not affected."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return immediately: uvicorn itself waits for connections."""

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # without descriptors or memory; waiting clients stay queued
                self._warnings.warning("cannot accept connections: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(
                    _PAUSE_S, self._loop.add_reader, self._listener, self._accept
                )
                return
            # The system assigns the lowest free descriptor, so all lower ones are in use.
            if client.fileno() >= self._first_reserved:
                client.close()
                self._on_refused()
                self._warnings.warning(
                    "closed a new connection: %d descriptors are in use, the others are reserved "
                    "for engines and files (raise the limit of open files)",
                    self._first_reserved,
                )
                continue
            client.setblocking(False)
            task = self._loop.create_task(self._connect(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol_factory, client, ssl=self._tls)
        except OSError as error:  # the TLS handshake failed, or the client has gone
            logger.debug("a connection failed: %s", error)
            client.close()
