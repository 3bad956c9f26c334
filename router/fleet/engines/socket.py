"""A ROUTER socket to which engines connect."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence

import zmq

from shared.logs import RateLimitedLogger
from shared.network.allow_list import AllowedKey
from shared.network.curve import Gatekeeper, guard, watch_peer
from shared.network.socket_file import SocketFile, SocketFileError
from shared.wire import Message, ToRouter, WireError, decode, encode

logger = logging.getLogger(__name__)

_BATCH = 256
_POLLIN = int(zmq.POLLIN)
"""As an integer: operations on flags of `enum` take microseconds."""
_MAX_FRAME_BYTES = 256 * 1024 * 1024
_LINGER_MS = 500


class EngineSocketError(Exception):
    """The address is not usable: in use, not permitted, or its directory does not exist."""


class EngineSocket:
    """A socket that receives on the event loop and sends without blocking.

    ``on_message`` is called with the peer's routing id, the message, its raw frames and the
    sender's key. A message that cannot be decoded is dropped with a warning, and ``on_undecodable``
    is called. With a ``gatekeeper``, the socket uses CURVE.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_message: Callable[[bytes, ToRouter, list[bytes], AllowedKey | None], None],
        on_undecodable: Callable[[], None],
        gatekeeper: Gatekeeper | None = None,
    ) -> None:
        """Bind the socket. Raises `EngineSocketError`."""
        self._gatekeeper = gatekeeper
        self._on_message = on_message
        self._on_undecodable = on_undecodable
        self._drop_log = RateLimitedLogger(logger, interval_s=1.0)
        self._receive_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            self._file = SocketFile(address)
        except SocketFileError as error:
            raise EngineSocketError(str(error)) from None
        self._socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            # No peer may take over another connection's name: it would receive the prompts of
            # another key.
            (zmq.ROUTER_HANDOVER, int(gatekeeper is None)),
            (zmq.MAXMSGSIZE, _MAX_FRAME_BYTES),
            (zmq.LINGER, _LINGER_MS),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        watch_peer(self._socket, address)
        self._watch = guard(self._socket, address, gatekeeper)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise EngineSocketError(f"cannot bind {address}: {error.strerror}") from None

    def start(self) -> None:
        """Start receiving on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self.receive_pending)
        self.receive_pending()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        if self._watch is not None:
            self._watch.close()
        self._socket.close()
        self._file.remove()

    def send(self, peer: bytes, message: Message, *payload: bytes | memoryview) -> bool | None:
        """Return True if ``message`` is queued, False if the queue is full, None if there is no
        such peer.

        The frames of ``payload`` are not copied, so they must not change.
        """
        try:
            frames = [peer, *encode(message, *payload)]
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=not payload)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return None
        finally:
            # The descriptor is edge-triggered: a send may consume the signal for received messages.
            self._schedule_receive()
        return True

    def receive_pending(self) -> None:
        """Receive messages in batches, so that other tasks on the loop do not wait long."""
        self._receive_scheduled = False
        for _ in range(_BATCH):
            # Polling is cheaper than an exception each time there is nothing to receive.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            if self._gatekeeper is None:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._handle_frames(peer, frames, None)
            else:
                self._handle_protected(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        self._schedule_receive()

    def _schedule_receive(self) -> None:
        if not self._receive_scheduled and self._loop is not None:
            self._receive_scheduled = True
            self._loop.call_soon(self.receive_pending)

    def _handle_protected(self, frames: Sequence[zmq.Frame]) -> None:
        assert self._gatekeeper is not None
        key = self._gatekeeper.find(frames)
        if key is not None:  # otherwise the key was on the list when it connected
            peer, *content = (frame.bytes for frame in frames)
            self._handle_frames(peer, content, key)

    def _handle_frames(self, peer: bytes, frames: Sequence[bytes], key: AllowedKey | None) -> None:
        try:
            message, payload = decode(frames, ToRouter)
        except WireError as error:
            self._on_undecodable()
            self._drop_log.warning("dropped a message from peer %s: %s", peer.hex(), error)
            return
        try:
            self._on_message(peer, message, payload, key)
        except Exception:
            # An error in handling one message must not prevent the handling of others.
            logger.exception("handling a %s from peer %s", type(message).__name__, peer.hex())
