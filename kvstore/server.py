"""The sockets of the kvstore. Invalid messages are counted and dropped."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue

import msgspec
import zmq

from kvstore.directory import BlockDirectory, BlockKey, InvalidBlockKey
from kvstore.lookups import Lookups
from kvstore.queue import PendingWrite
from kvstore.store import DiskStore
from kvstore.writer import Writer
from shared import wire
from shared.blockfile import MAX_FILE_BYTES
from shared.hashing import HASH_BYTES
from shared.logs import RateLimitedLogger
from shared.network.curve import Gatekeeper, guard, watch_peer
from shared.network.peer_limit import PeerWatch

MAX_REPLY_BYTES = 16 * 1024 * 1024
"""Max size of the blocks in one reply (but at least one block); the engine requests the rest."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""An engine with more unsent bytes than this gets no further blocks."""
MAX_HASHES = 32768
MAX_PEERS = 1024

_MAX_RECEIVED = 32
_MAX_REPLIES_PER_PEER = 4096
_MAX_QUEUED_READS = 16
_MAX_TURN_S = 0.2
logger = logging.getLogger(__name__)


class Server:
    """Binds ``endpoints``; one thread calls `serve` in a loop. With a ``gatekeeper``, tcp
    connections use CURVE.

    Raises: `zmq.ZMQError` if it cannot bind.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Sequence[str],
        directory: BlockDirectory,
        store: DiskStore,
        writer: Writer,
        *,
        acknowledges_early: bool = True,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        gatekeeper: Gatekeeper | None = None,
    ) -> None:
        """With ``acknowledges_early``, a put is acknowledged once it is queued, and reported again
        if it is lost after that; otherwise it is acknowledged once the block is on disk."""
        self._directory = directory
        self._store = store
        self._writer = writer
        self._acknowledges_early = acknowledges_early
        self._max_reply_bytes = max_reply_bytes
        self._local_peers: OrderedDict[bytes, None] = OrderedDict()
        self._dropped = 0
        self._drop_log = RateLimitedLogger(logger)
        self._replies: SimpleQueue[tuple[bytes, wire.Message, list[bytes]]] = SimpleQueue()
        self._unsent: dict[bytes, list[tuple[zmq.MessageTracker, int]]] = {}
        # A disk may hang, but this thread must not: it would miss its heartbeats, and be replaced
        # with a process that hangs too.
        self._lookups = Lookups()
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="reader")
        self._read_permits = threading.BoundedSemaphore(_MAX_QUEUED_READS)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._gatekeeper = gatekeeper
        self._watches: list[PeerWatch] = []
        self._poller = zmq.Poller()
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._sockets = [self._bind(context, endpoint) for endpoint in endpoints]
        if gatekeeper is not None:
            gatekeeper.start()

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.IPV6, int("[" in endpoint)),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _MAX_REPLIES_PER_PEER),
            (zmq.RCVHWM, _MAX_RECEIVED),
            (zmq.MAXMSGSIZE, MAX_FILE_BYTES),
        ):
            socket.set(option, value)
        if watch := guard(socket, endpoint, self._gatekeeper):
            self._watches.append(watch)
        watch_peer(socket, endpoint)
        socket.bind(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def serve(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for messages, and reply to them."""
        readable = dict(self._poller.poll(round(timeout_s * 1000)))
        with suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        self.send_replies()
        for number, socket_ in enumerate(self._sockets):
            if socket_ in readable:
                self._receive(bytes([number]), socket_)
        self.send_replies()

    def wake(self) -> None:
        """Make `serve` return soon. Safe on any thread and in signal handlers."""
        with suppress(OSError):  # full: `serve` will wake anyway
            self._wake_sender.send(b"\0")

    def _receive(self, number: bytes, socket_: zmq.Socket[bytes]) -> None:
        """Handle the messages at one socket. A peer's name begins with the socket's number."""
        until = time.monotonic() + _MAX_TURN_S
        while time.monotonic() < until:
            try:
                peer, *frames = self._read(socket_)
            except zmq.Again:
                break
            try:
                self._handle(number + peer, frames)
            except (wire.WireError, InvalidBlockKey) as error:
                self._drop(f"an invalid message: {error}")
            except Exception:
                self._dropped += 1
                logger.exception("internal error while handling a message, which is dropped")

    def _read(self, socket_: zmq.Socket[bytes]) -> list[bytes]:
        """Return the next message. Raises `zmq.Again` if there is none."""
        if self._gatekeeper is None or not socket_.get(zmq.CURVE_SERVER):
            return socket_.recv_multipart(zmq.NOBLOCK)
        while True:
            frames = socket_.recv_multipart(zmq.NOBLOCK, copy=False)
            if self._gatekeeper.find(frames) is not None:  # otherwise the key was allowed earlier
                return [frame.bytes for frame in frames]

    def send_replies(self) -> None:
        with suppress(Empty):
            while True:
                peer, message, payload = self._replies.get_nowait()
                blocks = [zmq.Frame(block, track=True, copy=False) for block in payload]
                try:
                    self._sockets[peer[0]].send_multipart(
                        [peer[1:], *wire.encode(message), *blocks], zmq.NOBLOCK, copy=False
                    )
                    self._track_unsent(peer, blocks)
                except zmq.ZMQError as error:  # EHOSTUNREACH: gone. EAGAIN: not reading
                    self._drop(f"a reply that its engine does not receive: {error}")

    def stats(self) -> wire.StoreStats:
        return msgspec.structs.replace(
            self._store.stats(),
            drops_total=self._writer.drops,
            dropped_messages_total=self._dropped,
        )

    def close(self) -> None:
        self._lookups.close()
        self._readers.shutdown(cancel_futures=True)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        for watch in self._watches:
            watch.close()
        for socket_ in self._sockets:
            socket_.close(linger=500)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _handle(self, peer: bytes, frames: Sequence[bytes]) -> None:
        message, payload = wire.decode(frames, wire.ToStore)
        match message:
            case wire.Locate():
                if (difference := wire.other_version(message.protocol)) is not None:
                    raise wire.WireError(f"the engine {difference}")
                path = str(self._directory.nonce_path)
                self._reply(peer, wire.Nonce(path=path, finds_last=True))
            case wire.Located(nonce=nonce):
                self._locate(peer, nonce == self._directory.nonce)
            case wire.Has() | wire.FindLast():
                self._look_up(peer, message)
            case wire.Get():
                self._get(peer, message)
            case wire.Put():
                self._put(peer, message, payload)
            case wire.Touch():
                keys = _keys(message)
                self._lookups.submit(peer, lambda: self._store.touch(keys))
            case wire.Corrupt():
                self._writer.verify(BlockKey.checked(message.namespace, message.hash))
            case wire.Clear(namespace=namespace):
                self._writer.clear(BlockKey.checked(namespace, bytes(HASH_BYTES)).namespace)
            case wire.StoreStatsWanted():
                self._reply(peer, wire.StoreStatsReply(stats=self.stats()))

    def _locate(self, peer: bytes, proven: bool) -> None:
        self._local_peers.pop(peer, None)
        if proven:
            self._local_peers[peer] = None
            if len(self._local_peers) > MAX_PEERS:
                self._local_peers.popitem(last=False)

    def _look_up(self, peer: bytes, message: wire.Has | wire.FindLast) -> None:
        keys = _keys(message)

        def reply(found: int | None) -> None:
            if isinstance(message, wire.Has):
                self._reply(peer, wire.HasReply(ticket=message.ticket, count=found or 0))
            else:
                self._reply(peer, wire.FindLastReply(ticket=message.ticket, position=found))

        find = self._store.has if isinstance(message, wire.Has) else self._store.find_last
        if not self._lookups.submit(peer, lambda: reply(find(keys))):
            reply(None)

    def _get(self, peer: bytes, message: wire.Get) -> None:
        keys, ticket = _keys(message), message.ticket

        def reply_paths() -> None:
            paths = self._store.get(keys)
            self._reply(peer, wire.GetReply(ticket=ticket, count=len(paths), paths=paths))

        if peer in self._local_peers:
            if self._lookups.submit(peer, reply_paths):
                return
        elif self._may_send_to(peer) and self._read_permits.acquire(blocking=False):
            self._readers.submit(self._read_blocks, peer, ticket, keys)
            return
        self._reply(peer, wire.GetReply(ticket=ticket, count=0))

    def _may_send_to(self, peer: bytes) -> bool:
        """Return whether ``peer`` reads its replies. ZeroMQ limits messages, not bytes."""
        for name, blocks in list(self._unsent.items()):
            waiting = [(sent, size) for sent, size in blocks if not sent.done]
            if waiting:
                self._unsent[name] = waiting
            else:
                del self._unsent[name]
        return sum(size for _, size in self._unsent.get(peer, ())) < MAX_UNSENT_BYTES

    def _track_unsent(self, peer: bytes, blocks: Sequence[zmq.Frame]) -> None:
        for block in blocks:
            if block.tracker is not None:
                self._unsent.setdefault(peer, []).append((block.tracker, len(block)))

    def _read_blocks(self, peer: bytes, ticket: int, keys: Sequence[BlockKey]) -> None:
        """Read the blocks of one reply, on a reader thread."""
        blocks: list[bytes] = []
        size = asked = 0
        try:
            for key in keys[: wire.MAX_FRAMES - 1]:
                block = self._store.read(key) if self._store.has([key]) else None
                if block and blocks and size + len(block) > self._max_reply_bytes:
                    break
                asked += 1
                if block is None:
                    break
                blocks.append(block)
                size += len(block)
            self._store.get(keys[:asked])  # counts the reads, and marks the blocks as used
        finally:
            self._read_permits.release()
            self._reply(peer, wire.GetReply(ticket=ticket, count=len(blocks)), blocks)

    def _put(self, peer: bytes, message: wire.Put, payload: Sequence[bytes]) -> None:
        if len(payload) != 1:
            raise wire.WireError(f"a put with {len(payload)} files")

        def done(reason: str) -> None:
            reply = wire.PutReply(ticket=message.ticket, stored=not reason, reason=reason)
            self._reply(peer, reply)

        def lost(reason: str) -> None:
            if reason:  # the engine was already told that it is stored
                done(reason)

        key = BlockKey.checked(message.namespace, message.hash)
        put = PendingWrite(key, payload[0], lost if self._acknowledges_early else done, peer)
        refused = self._writer.offer(put)
        if refused or self._acknowledges_early:
            done(refused)

    def _reply(self, peer: bytes, message: wire.Message, payload: Sequence[bytes] = ()) -> None:
        """Queue a reply, from any thread; `serve` sends it."""
        self._replies.put((peer, message, list(payload)))
        self.wake()

    def _drop(self, what: str) -> None:
        self._dropped += 1
        self._drop_log.warning("dropped %s (%d so far)", what, self._dropped)


def _keys(message: wire.Has | wire.FindLast | wire.Get | wire.Touch) -> list[BlockKey]:
    return [BlockKey.checked(message.namespace, hash) for hash in message.hashes[:MAX_HASHES]]
