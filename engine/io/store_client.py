"""The engine's client of the kvstore: a block by its hash, or a miss within a bounded time.

The IO thread owns the socket and calls `on_readable` and `tick`. Files are read and checksums
computed on the pool. Every other method may be called from any thread: it posts an action for
the IO thread and wakes it.

A kvstore that is away costs nothing: a lost connection turns all open requests into misses. One
that hangs costs one time-out; until it answers again, fetches are misses at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine.io import block_fetch
from engine.io.block_fetch import BlockFetch, FetchReply, Payload
from shared import wire
from shared.blockfile import MAX_FILE_BYTES, BlockFileError, encode
from shared.logs import RateLimitedLogger

logger = logging.getLogger(__name__)

MAX_STORES = 256
MAX_STORE_BYTES = 256 * 1024 * 1024
"""Bounds of what is on its way to the kvstore at once. A block beyond them is dropped."""
STORE_TIMEOUT_S = 30.0
PROBE_INTERVAL_S = 1.0


@dataclass(frozen=True)
class StoreClientStats:
    """Blocks and bytes since the start."""

    reads: int = 0
    writes: int = 0
    drops: int = 0  # blocks that were not stored, whether this client or the kvstore dropped them
    corrupt: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    store: wire.StoreStats | None = None
    """The last figures of the kvstore itself, None while it is away."""


class StoreClient:
    """Fetches and stores the blocks of one ``namespace``.

    ``on_fetched(ticket, payloads)`` is called once per `fetch`, on the IO thread. ``wake``
    makes the IO thread call `tick` soon; it calls it at least twice a second anyway.
    ``timeout_s`` is how long the kvstore, or its disk, may be silent.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        namespace: str,
        pool: ThreadPoolExecutor,
        on_fetched: Callable[[int, list[Payload]], None],
        wake: Callable[[], None],
        timeout_s: float = 2.0,
    ) -> None:
        self._namespace = namespace
        self._pool = pool
        self._on_fetched = on_fetched
        self._wake = wake
        self._timeout_s = timeout_s
        self._actions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._tickets = count(1)
        self._session: Literal["away", "connected", "locating", "ready"] = "away"
        self._connected_at = 0.0
        self._unresponsive = False
        self._probed_at: float | None = None
        self._next_probe_at = 0.0
        self._requested: dict[int, BlockFetch] = {}
        self._reading: set[BlockFetch] = set()
        self._waiting: list[BlockFetch] = []
        self._pending_puts: dict[int, _PendingPut] = {}
        self._lock = threading.Lock()
        self._num_stores = 0
        self._store_bytes = 0
        self._stats = StoreClientStats()
        self._warnings = RateLimitedLogger(logger)
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a kvstore that is away
        self.socket.set(zmq.RECONNECT_IVL, 100)
        self.socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.set(zmq.HEARTBEAT_IVL, 3000)  # a machine that vanished closes nothing
        self.socket.set(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self.socket.set(zmq.MAXMSGSIZE, MAX_FILE_BYTES)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self.socket.get_monitor_socket(events)
        self.socket.connect(endpoint)

    @property
    def stats(self) -> StoreClientStats:
        with self._lock:
            return self._stats

    @property
    def is_ready(self) -> bool:
        """Whether the kvstore is there and answers. If not, no block is worth exporting."""
        return self._session == "ready" and not self._unresponsive

    def fetch(self, ticket: int, hashes: Sequence[bytes]) -> None:
        """Fetch the longest run of verified blocks from the first hash on.

        ``on_fetched`` gets their payloads; the list is empty if the kvstore is of no help.
        """
        fetch = BlockFetch(ticket, tuple(hashes), time.monotonic() + self._timeout_s)
        self._post(lambda: self._request(fetch))

    def store(self, hash: bytes, payload: Sequence[bytes | memoryview]) -> bool:
        """Send a block to the kvstore, if it is there and the bounds leave room.

        Return False if the block was dropped at once; True is no promise. The buffers are read
        on the pool, so they must not change.
        """
        size = sum(memoryview(buffer).nbytes for buffer in payload)
        with self._lock:
            is_full = self._num_stores >= MAX_STORES or self._store_bytes + size > MAX_STORE_BYTES
            if is_full or not self.is_ready:
                self._count(drops=1)
                return False
            self._num_stores += 1
            self._store_bytes += size
        try:
            self._pool.submit(self._encode, hash, payload, size)
        except RuntimeError:  # the engine is about to end, and with it the pool
            return False
        return True

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Tell the kvstore that a chain of blocks is in use; ``hashes`` begin with its first."""
        message = wire.Touch(namespace=self._namespace, hashes=list(hashes))
        self._post(lambda: self._send_if_ready(message))

    def tick(self, now: float) -> None:
        """Run posted actions, time-outs and probes. ``now`` is time.monotonic()."""
        self._poll_connection()
        with suppress(Empty):
            while True:
                self._actions.get_nowait()()
        for fetch in [*self._waiting, *self._requested.values(), *self._reading]:
            if now >= fetch.deadline:
                self._unresponsive = self._unresponsive or fetch not in self._reading
                self._give_up(fetch)
        for ticket, put in list(self._pending_puts.items()):
            if now >= put.deadline:
                self._finish_put(ticket, stored=False)
        self._probe(now)

    def on_readable(self) -> None:
        """Handle every message that the kvstore sent."""
        self._poll_connection()
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unresponsive = False
            try:
                message, payload = wire.decode(frames, wire.FromStore)
            except wire.WireError as error:
                self._warnings.warning("dropped a message of the kvstore: %s", error)
                continue
            match message:
                case wire.Nonce(path=path):
                    self._pool.submit(self._read_nonce, path)
                case wire.GetReply():
                    self._on_get_reply(message, payload)
                case wire.PutReply(ticket=ticket, stored=stored):
                    self._finish_put(ticket, stored)
                case wire.StoreStatsReply(stats=stats):
                    self._probed_at = None
                    with self._lock:
                        self._stats = replace(self._stats, store=stats)

    def close(self) -> None:
        """Answer every open fetch with the blocks it has so far. Called on the IO thread."""
        self._on_disconnected()
        self.tick(time.monotonic())
        for fetch in list(self._reading):
            self._give_up(fetch)
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()

    # -- the connection, on the IO thread --------------------------------------

    def _poll_connection(self) -> None:
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                self._on_disconnected()
            else:
                self._session = "connected"
                self._connected_at = time.monotonic()
        if self._session == "connected" and self._send(wire.Locate()):
            self._session = "locating"

    def _on_disconnected(self) -> None:
        if self._session == "ready":
            logger.info("the kvstore is gone; its blocks are misses until it is back")
        self._session = "away"
        self._unresponsive = False
        self._probed_at = None
        with self._lock:
            self._stats = replace(self._stats, store=None)
        for fetch in [*self._waiting, *self._requested.values()]:
            self._give_up(fetch)
        for ticket in list(self._pending_puts):
            self._finish_put(ticket, stored=False)

    def _read_nonce(self, path: str) -> None:
        """Read the kvstore's nonce, if ``path`` is a file of this machine. Runs on the pool."""
        nonce = ""
        with suppress(OSError, UnicodeDecodeError):
            nonce = block_fetch.read_file(path, 1024).decode()
        self._post(lambda: self._on_nonce_read(nonce))

    def _on_nonce_read(self, nonce: str) -> None:
        if self._session in ("locating", "ready") and self._send(wire.Located(nonce=nonce)):
            if self._session != "ready":
                how = "its files are read directly" if nonce else "its blocks come over the wire"
                logger.info("the kvstore is there; %s", how)
            self._session = "ready"
            waiting, self._waiting = self._waiting, []
            for fetch in waiting:
                self._request(fetch)

    def _probe(self, now: float) -> None:
        if self._probed_at is not None and now - self._probed_at > self._timeout_s:
            if not self._unresponsive:
                self._warnings.warning(
                    "the kvstore does not answer; its blocks are misses until it does"
                )
            self._unresponsive = True
        if self._session != "away" and self._probed_at is None and now >= self._next_probe_at:
            self._next_probe_at = now + PROBE_INTERVAL_S
            if self._send(wire.StoreStatsWanted()):
                self._probed_at = now

    def _send(self, message: wire.Message, *payload: bytes) -> bool:
        try:
            self.socket.send_multipart(wire.encode(message, *payload), zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # EAGAIN: the kvstore is away, or takes nothing more
            return False
        return True

    def _send_if_ready(self, message: wire.Message) -> None:
        if self.is_ready:
            self._send(message)

    def _post(self, action: Callable[[], None]) -> None:
        self._actions.put(action)
        self._wake()

    # -- fetches ---------------------------------------------------------------

    def _request(self, fetch: BlockFetch) -> None:
        """Ask for all blocks that ``fetch`` still lacks. Runs on the IO thread."""
        rest = list(fetch.hashes[len(fetch.payloads) :])
        if not rest or self._unresponsive or self._session == "away":
            self._finish(fetch)
        elif self._session != "ready":
            if time.monotonic() - self._connected_at < self._timeout_s:
                self._waiting.append(fetch)
            else:
                self._finish(fetch)  # the kvstore does not understand this engine
        else:
            ticket = next(self._tickets)
            self._requested[ticket] = fetch
            fetch.get_ticket = ticket
            fetch.deadline = time.monotonic() + self._timeout_s
            if not self._send(wire.Get(ticket=ticket, namespace=self._namespace, hashes=rest)):
                self._give_up(fetch)

    def _on_get_reply(self, message: wire.GetReply, frames: Sequence[bytes]) -> None:
        fetch = self._requested.pop(message.ticket, None)
        if fetch is None:
            return  # given up
        sources: Sequence[str | bytes] = frames if message.paths is None else message.paths
        sources = sources[: len(fetch.hashes) - len(fetch.payloads)]
        if not sources:
            self._finish(fetch)
            return
        self._reading.add(fetch)
        fetch.deadline = time.monotonic() + self._timeout_s
        reply = FetchReply(fetch, sources, may_be_cut=message.paths is None)
        for index in range(len(sources)):
            self._pool.submit(self._read_block, reply, index)

    def _read_block(self, reply: FetchReply, index: int) -> None:
        """Read and verify one block of ``reply``. Runs on the pool."""
        payload: Payload | None = None
        if reply.wants(index):
            hash = reply.hash_of(index)
            try:
                payload = block_fetch.read_block(reply.sources[index], hash, self._namespace)
            except (OSError, BlockFileError) as error:
                self._warnings.warning("a bad block: %s", error)
                corrupt = wire.Corrupt(namespace=self._namespace, hash=hash)
                self._post(lambda: self._send_if_ready(corrupt))
                with self._lock:
                    self._count(corrupt=1)
        reply.fetch.deadline = time.monotonic() + self._timeout_s
        if reply.add(index, payload):
            self._post(lambda: self._on_reply_read(reply))

    def _on_reply_read(self, reply: FetchReply) -> None:
        """Finish the fetch, or ask for the rest of its blocks. Runs on the IO thread."""
        fetch = reply.fetch
        self._reading.discard(fetch)
        if fetch.is_done:
            return
        fetch.payloads += reply.good_payloads()
        if reply.has_more():
            self._request(fetch)
        else:
            self._finish(fetch)

    def _give_up(self, fetch: BlockFetch) -> None:
        self._requested.pop(fetch.get_ticket, None)
        self._reading.discard(fetch)
        if fetch in self._waiting:
            self._waiting.remove(fetch)
        self._finish(fetch)

    def _finish(self, fetch: BlockFetch) -> None:
        if fetch.is_done:
            return
        fetch.is_done = True
        size = sum(buffer.nbytes for payload in fetch.payloads for buffer in payload)
        with self._lock:
            self._count(reads=len(fetch.payloads), read_bytes=size)
        self._on_fetched(fetch.ticket, fetch.payloads)

    # -- stores ----------------------------------------------------------------

    def _encode(self, hash: bytes, payload: Sequence[bytes | memoryview], size: int) -> None:
        """Make the block's file and post it. Runs on the pool."""
        try:
            data = encode(hash, self._namespace, payload)
        except Exception:
            logger.exception("a block cannot be encoded")
            data = b""
        self._post(lambda: self._put(hash, data, size))

    def _put(self, hash: bytes, data: bytes, size: int) -> None:
        """Send the file of a block; empty ``data`` is dropped. Runs on the IO thread."""
        ticket = next(self._tickets)
        deadline = time.monotonic() + STORE_TIMEOUT_S
        self._pending_puts[ticket] = _PendingPut(size, len(data), deadline)
        message = wire.Put(ticket=ticket, namespace=self._namespace, hash=hash)
        if not data or self._session != "ready" or not self._send(message, data):
            self._finish_put(ticket, stored=False)

    def _finish_put(self, ticket: int, stored: bool) -> None:
        put = self._pending_puts.pop(ticket, None)
        if put is None:
            return
        with self._lock:
            self._num_stores -= 1
            self._store_bytes -= put.payload_bytes
            written_bytes = put.file_bytes if stored else 0
            self._count(writes=stored, drops=not stored, written_bytes=written_bytes)

    def _count(self, **more: int) -> None:
        """Add to the figures. The caller holds the lock."""
        totals = {name: getattr(self._stats, name) + count for name, count in more.items()}
        self._stats = replace(self._stats, **totals)


@dataclass(frozen=True)
class _PendingPut:
    payload_bytes: int
    file_bytes: int
    deadline: float
