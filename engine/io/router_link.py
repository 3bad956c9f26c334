"""The connection to one of the engine's routers, and its state."""

from __future__ import annotations

import logging
import time
from collections import deque

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared import wire
from shared.network.curve import HANDSHAKE_FAILED, EngineKeyFiles
from shared.network.keyed_connection import KeyedConnection

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 2_000
OUTBOX_LIMIT = 20_000
_OPTIONS = (
    (zmq.LINGER, 500),
    (zmq.SNDHWM, HIGH_WATER_MARK),
    (zmq.RCVHWM, HIGH_WATER_MARK),
    (zmq.RECONNECT_IVL, 50),
    (zmq.RECONNECT_IVL_MAX, 1000),
)
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | HANDSHAKE_FAILED
)


class RouterLink:
    """The DEALER that connects to ``endpoint``. Used on the IO thread only, once it runs."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: EngineKeyFiles | None,
    ) -> None:
        self.endpoint = endpoint
        self.router_id: str | None = None
        """The router id in its last `Ping`."""
        self.pinged = False
        self.is_connected = False
        self.gone_since: float | None = None
        """When the connection to a router with requests was lost; None while it is connected."""
        self._outbox: deque[list[bytes | memoryview]] = deque()
        self._complaint = ""
        self._connection = KeyedConnection(
            context, endpoint, keys, options=_OPTIONS, events=_EVENTS
        )
        self.socket, self.monitor = self._connection.socket, self._connection.monitor

    def __str__(self) -> str:
        return self.endpoint

    def post(self, message: wire.Message, *payload: bytes) -> None:
        """Send ``message`` with the next `flush`."""
        self._outbox.append(wire.encode(message, *payload))

    @property
    def is_backed_up(self) -> bool:
        """Whether messages are queued because the router does not read."""
        return bool(self._outbox)

    @property
    def is_overfull(self) -> bool:
        return len(self._outbox) > OUTBOX_LIMIT

    @property
    def asks_again(self) -> bool:
        """Whether the router has refused this engine, which will retry."""
        return self._connection.asks_again

    @property
    def is_away(self) -> bool:
        """Whether the router is gone and not expected back for its requests."""
        return not self.is_connected and self.gone_since is None

    def clear(self) -> None:
        self._outbox.clear()

    def flush(self) -> bool:
        """Send the queued messages; return False if some are left."""
        while self._outbox:
            try:
                self.socket.send_multipart(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._outbox.popleft()
        return True

    def receive(self) -> list[bytes] | None:
        """Return the next message's frames; None if none has arrived."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def on_event(self) -> None:
        """Process events of the connection."""
        event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_connected, self.gone_since, self._complaint = True, None, ""
        elif event == zmq.EVENT_DISCONNECTED:
            self.is_connected = False
            if self.router_id is not None and self.gone_since is None:
                self.gone_since = time.monotonic()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._connection.on_refused(time.monotonic())
            self._refused(
                f"the key {self._connection.own_key} of this engine is not on its allow list"
            )
        elif self._connection.own_key:
            self._refused("it does not use CURVE, or its key is not the local server.key")
        elif self.endpoint.startswith("tcp:"):
            self._refused("it requires CURVE: set --curve-dir")

    def tick(self, now: float, *, is_idle: bool) -> None:
        """Connect again if the router has refused this engine a while ago, or if the keys have
        changed and ``is_idle``: no request of the router is running."""
        if self._connection.tick(now, is_idle=is_idle or not self.is_connected):
            self.is_connected = False

    def close(self) -> None:
        self._connection.close()

    def compare(self, protocol: int) -> None:
        """Log it if this engine does not know the router's ``protocol``. A newer router may still
        know the engine's."""
        if (difference := wire.other_version(protocol)) is not None:
            self._complain(difference)

    def _refused(self, reason: str) -> None:
        self._complain(f"refuses this engine: {reason}")

    def _complain(self, complaint: str) -> None:
        """Log ``complaint`` once in a row."""
        if complaint != self._complaint:
            self._complaint = complaint
            logger.error("the router at %s %s", self.endpoint, complaint)
