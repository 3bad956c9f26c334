"""Closes connections over tcp that would use up the descriptors of this process.

Anyone who reaches a socket can connect, and needs no key until the handshake ends. ZeroMQ has no
limit for that, and ends the process if an ``ipc://`` socket has no descriptor left for a peer.
"""

from __future__ import annotations

import logging
import resource
import socket
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.descriptors import reserve
from shared.logs import RateLimitedLogger

_COUNT_AGAIN_S = 0.1
_POLL_S = 0.5

logger = logging.getLogger(__name__)


class PeerLimit:
    """The connections to the tcp sockets of this process, of which a quarter of its descriptors may
    be. Not safe to use from several threads."""

    def __init__(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max = limit // 4
        # Clients over HTTP leave the whole reserve: half of it is for peers over tcp.
        self._first_reserved = limit - reserve(limit) // 2
        self._ports: dict[int, int] = {}  # of the connections that may still be open
        self._count_at = 0.0
        self._warnings = RateLimitedLogger(logger)

    def on_accepted(self, descriptor: int, endpoint: str) -> bool:
        """Record a connection to ``endpoint``, or close it. Return whether it may stay."""
        port = int(endpoint.rpartition(":")[2])
        self._ports[descriptor] = port
        if len(self._ports) > self._max and time.monotonic() >= self._count_at:
            self._ports = {each: at for each, at in self._ports.items() if _is_at(each, at)}
            self._count_at = time.monotonic() + _COUNT_AGAIN_S
        if len(self._ports) <= self._max and descriptor < self._first_reserved:
            return True
        del self._ports[descriptor]
        _shut_down(descriptor, port)
        self._warnings.warning(
            "closed a new connection to %s: peers use %d descriptors, and may use %d (raise the "
            "limit of open files)",
            endpoint,
            len(self._ports),
            self._max,
        )
        return False


class PeerWatch:
    """Applies a `PeerLimit` to a socket without keys, on a thread."""

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        """Call it before ``watched`` is bound."""
        self._monitor = watched.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._limit = PeerLimit()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._monitor.close(0)

    def _watch(self) -> None:
        while not self._closing.is_set():
            if self._monitor.poll(int(_POLL_S * 1000)):
                event = recv_monitor_message(self._monitor)
                self._limit.on_accepted(event["value"], event["endpoint"].decode())


def _is_at(descriptor: int, port: int) -> bool:
    """Return whether ``descriptor`` is still a connection to ``port`` of this machine."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        return bool(connection.getsockname()[1:2] == (port,))
    except OSError:
        return False
    finally:
        connection.detach()  # it is ZeroMQ's


def _shut_down(descriptor: int, port: int) -> None:
    """End a connection, which ZeroMQ then closes."""
    if not _is_at(descriptor, port):
        return
    connection = socket.socket(fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer was faster
    finally:
        connection.detach()
