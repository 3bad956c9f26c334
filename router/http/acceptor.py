"""Accepts the connections of HTTP clients, and leaves descriptors for everything else.

Without a free descriptor, ZeroMQ ends the process: an engine that joins at an ``ipc://`` socket
then would be enough. Neither asyncio nor uvloop limits how many connections it accepts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from shared.descriptors import reserve
from shared.logs import RateLimitedLogger
from shared.network.client_address import TrustedProxies, client_network

_AT_ONCE = 8
"""Max connections accepted before other events are handled. Each takes up to a millisecond, with
the begin of its request and up to 256 KB of its body. With 32 at once, turns of the event loop took
up to 30 ms, and an answer needs several turns."""
_PAUSE_S = 1.0
_WARN_INTERVAL_S = 10.0

logger = logging.getLogger("router")


class Acceptor:
    """Accepts connections from ``listener`` on the running event loop until it is closed. Has those
    parts of `asyncio.Server` that uvicorn uses.

    ``max_descriptors`` is the process's limit. A connection for which only the descriptors of the
    reserve are left, or one beyond the ``limit`` of its address, is closed at once, and
    ``on_refused`` is called.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol_factory: Callable[[], EndingProtocol],
        tls: ssl.SSLContext | None,
        max_descriptors: int,
        on_refused: Callable[[], None],
        limit: AddressLimit,
    ) -> None:
        self._limit = limit
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
                client, address = self._listener.accept()
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
            host = client_network(address[0]) if isinstance(address, tuple) else ""
            if not self._limit.take(host, address[0] if host else ""):
                client.close()
                self._on_refused()
                self._warnings.warning(
                    "closed a new connection of %s, which has %d (--max-connections-per-address; "
                    "name a proxy with --trusted-proxy)",
                    host,
                    self._limit.max_connections,
                )
                continue
            client.setblocking(False)
            task = self._loop.create_task(self._connect(client, host))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: socket.socket, host: str) -> None:
        protocol = self._protocol_factory()
        protocol.on_lost = partial(self._limit.give_back, host)
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, client, ssl=self._tls)
        except BaseException as error:  # the TLS handshake failed, or the client has gone
            client.close()
            if not protocol.was_made:
                self._limit.give_back(host)
            if not isinstance(error, OSError):
                raise
            logger.debug("a connection failed: %s", error)


class EndingProtocol(asyncio.Protocol):
    """A protocol that tells when its connection has ended."""

    on_lost: Callable[[], None] | None = None
    was_made = False


class AddressLimit:
    """Counts the connections of each address, so that one host cannot take all descriptors.

    The addresses of ``proxies`` are not limited."""

    def __init__(self, max_connections: int, proxies: Sequence[str]) -> None:
        """``max_connections`` of 0 is no limit."""
        self.max_connections = max_connections
        self._proxies = TrustedProxies(proxies)
        self._counts: Counter[str] = Counter()

    def take(self, host: str, address: str) -> bool:
        """Count a connection of ``host``, whose ``address`` may be one of several, unless it has
        too many."""
        is_full = self.max_connections and self._counts[host] >= self.max_connections
        if is_full and not self._proxies.trust(address):
            return False
        self._counts[host] += 1
        return True

    def give_back(self, host: str) -> None:
        self._counts[host] -= 1
        if not self._counts[host]:
            del self._counts[host]
