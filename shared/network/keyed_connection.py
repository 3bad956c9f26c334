"""A connection of an engine, whose keys may be replaced and may be allowed late."""

from __future__ import annotations

import logging

import zmq

from shared.network.curve import EngineKeyFiles

_ASK_AGAIN_S = 5.0
"""Pause after a refusal. ZeroMQ itself does not retry then."""
_LOOK_S = 2.0
"""Interval between checks of the key files."""

logger = logging.getLogger(__name__)


class KeyedConnection:
    """The connection of ``socket`` to ``endpoint``, unencrypted without ``keys``."""

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, keys: EngineKeyFiles | None
    ) -> None:
        self._socket, self._endpoint, self._files = socket, endpoint, keys
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
        self._socket.disconnect(self._endpoint)
        self._connect()
        return True

    def _connect(self) -> None:
        if self._keys is not None:
            self._keys.protect(self._socket)
        self._socket.connect(self._endpoint)
