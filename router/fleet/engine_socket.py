"""The ROUTER socket to which engines connect."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from shared.wire import Message, ToRouter, WireError, decode, encode

logger = logging.getLogger(__name__)

_BATCH = 256
_MAX_FRAME_BYTES = 256 * 1024 * 1024
_LINGER_MS = 500


class EngineSocketError(Exception):
    """The address cannot be used: taken, not allowed, no such directory."""


class EngineSocket:
    """Receives on the event loop and sends without blocking.

    ``on_message`` is called with the peer's routing id, the message and its raw frames;
    what is no message is counted (``on_undecodable``), logged and dropped.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes, ToRouter, list[bytes]], None],
        on_undecodable: Callable[[], None],
    ) -> None:
        """Binds. Raises `EngineSocketError`."""
        self._on_message = on_message
        self._on_undecodable = on_undecodable
        self._last_warning = float("-inf")
        self._receive_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._path = address.removeprefix("ipc://")
        self._lock = _lock(address)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.MAXMSGSIZE, _MAX_FRAME_BYTES),
            (zmq.LINGER, _LINGER_MS),
        ):
            self._socket.setsockopt(option, value)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise EngineSocketError(f"cannot bind {address}: {error.strerror}") from None

    def start(self) -> None:
        """Begins to receive, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self.receive_pending)
        self.receive_pending()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                Path(self._path).unlink()  # ZeroMQ leaves it
            os.close(self._lock)

    def send(self, peer: bytes, message: Message) -> bool | None:
        """True when it is on its way, False when the peer's queue is full, None when there is
        no such peer."""
        try:
            self._socket.send_multipart([peer, *encode(message)], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return None
        finally:
            # The descriptor is edge-triggered: what a send has seen coming is not signalled again.
            self._schedule_receive()
        return True

    def receive_pending(self) -> None:
        """Receives what is there, in batches, so that nobody else waits for long."""
        self._receive_scheduled = False
        for _ in range(_BATCH):
            # An exception for every time that nothing is there would cost more than to ask.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._handle_frames(frames[0], frames[1:])
        self._schedule_receive()

    def _schedule_receive(self) -> None:
        if not self._receive_scheduled and self._loop is not None:
            self._receive_scheduled = True
            self._loop.call_soon(self.receive_pending)

    def _handle_frames(self, peer: bytes, frames: Sequence[bytes]) -> None:
        try:
            message, payload = decode(frames, ToRouter)
        except WireError as error:
            self._on_undecodable()
            now = time.monotonic()
            if now - self._last_warning > 1:
                self._last_warning = now
                logger.warning("dropped a message from peer %s: %s", peer.hex(), error)
            return
        try:
            self._on_message(peer, message, payload)
        except Exception:
            # A bug of ours in handling one message must not stop the others from being heard.
            logger.exception("handling a %s from peer %s", type(message).__name__, peer.hex())


def _lock(address: str) -> int | None:
    """Holds ``address`` against a second router: a ZeroMQ bind would take over silently."""
    scheme, _, path = address.partition("://")
    if scheme != "ipc":
        return None
    try:
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EngineSocketError(f"cannot bind {address}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise EngineSocketError(f"cannot bind {address}: another router has it") from None
    return lock
