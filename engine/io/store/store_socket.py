"""The socket that connects to the kvstore."""

from __future__ import annotations

import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.blockfile import MAX_FILE_BYTES
from shared.network.curve import EngineKeyFiles
from shared.network.keyed_connection import KeyedConnection

_OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.IMMEDIATE, 1),  # nothing is queued for a missing kvstore
    (zmq.RECONNECT_IVL, 100),
    (zmq.RECONNECT_IVL_MAX, 1000),
    (zmq.HEARTBEAT_IVL, 3000),  # a vanished machine closes no connection
    (zmq.HEARTBEAT_TIMEOUT, 10_000),
    (zmq.MAXMSGSIZE, MAX_FILE_BYTES),
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class StoreSocket:
    """A DEALER and its monitor. Used on the IO thread only, once it runs."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: EngineKeyFiles | None,
    ) -> None:
        self._connection = KeyedConnection(
            context, endpoint, keys, options=_OPTIONS, events=_EVENTS
        )
        self.dealer, self._monitor = self._connection.socket, self._connection.monitor

    def changes(self) -> Iterator[bool]:
        """Yield whether the kvstore is connected, after each change of that."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._connection.on_refused(time.monotonic())
            else:
                yield event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def tick(self, now: float, *, is_idle: bool) -> bool:
        """Return whether the connection was replaced (see `KeyedConnection.tick`)."""
        return self._connection.tick(now, is_idle=is_idle)

    def close(self) -> None:
        self._connection.close()
