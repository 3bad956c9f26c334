"""A connection of an engine, whose keys may be replaced and may be allowed late."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import zmq

from shared.network.curve import EngineKeyFiles, watch_peer

_ASK_AGAIN_S = 5.0
"""Pause after a refusal. ZeroMQ itself does not retry then."""
_LOOK_S = 2.0
"""Interval between checks of the key files."""

logger = logging.getLogger(__name__)


class KeyedConnection:
    """A DEALER that connects to ``endpoint``, unencrypted without ``keys``, and its monitor."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: EngineKeyFiles | None,
        *,
        options: Iterable[tuple[int, int]],
        events: int,
    ) -> None:
        """``options`` of the socket come after those of `watch_peer`; ``events`` are monitored."""
        self._endpoint, self._files = endpoint, keys
        self.socket = context.socket(zmq.DEALER)
        watch_peer(self.socket, endpoint)
        for option, value in (*options, (zmq.IPV6, int("[" in endpoint))):
            self.socket.set(option, value)
        self.monitor = self.socket.get_monitor_socket(events)
        self._keys = None if keys is None else keys.refresh()
        self._retry_at: float | None = None
        self._look_at = 0.0
        self._connect()

    @property
    def own_key(self) -> str:
        """The public key in use; empty if there is none."""
        return "" if self._keys is None else self._keys.own.public

    @property
    def asks_again(self) -> bool:
        """Whether the peer has refused the key, and will be asked again."""
        return self._retry_at is not None

    def on_refused(self, now: float) -> None:
        """Connect again after a while: the key may be allowed by then, or replaced."""
        self._retry_at = now + _ASK_AGAIN_S

    def tick(self, now: float, *, is_idle: bool) -> bool:
        """Connect again if it is time, or if the keys have changed and nothing is interrupted by
        that. Return whether it did."""
        retries = self._retry_at is not None and now >= self._retry_at
        found = self._keys
        if self._files is not None and (retries or now >= self._look_at):
            self._look_at = now + _LOOK_S
            found = self._files.refresh()
        if not retries and (found == self._keys or not is_idle):
            return False
        if found != self._keys:
            logger.info("connecting to %s with new keys", self._endpoint)
        self._keys, self._retry_at = found, None
        self.socket.disconnect(self._endpoint)
        self._connect()
        return True

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()

    def _connect(self) -> None:
        if self._keys is not None:
            self._keys.protect(self.socket)
        self.socket.connect(self._endpoint)
