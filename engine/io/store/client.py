"""The engine's client of the kvstore: a block by its hash, or a miss within a bounded time.

The IO thread owns the socket and calls `on_readable` and `tick`. Files are read and checksums
computed on the pool. Every other method may be called from any thread: it posts an action for the
IO thread and wakes it.

A missing kvstore costs nothing: a lost connection turns all open requests into misses. A hanging
one costs one timeout; until it responds again, fetches miss immediately.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Literal

import zmq

from engine.io.store import block_fetch
from engine.io.store.block_fetch import BlockFetch, FetchReply, FileKind, Payload
from engine.io.store.block_puts import BlockPuts
from engine.io.store.block_reader import BlockReader
from engine.io.store.cache_clear import CacheClear
from engine.io.store.prefix_fetch import OnFetched, start_of
from engine.io.store.questions import Question, Questions
from engine.io.store.stats import StoreClientStats, StoreCounters
from engine.io.store.store_socket import StoreSocket
from engine.plan import Cancellation, PartSearch, StateSearch, StoreRoom
from shared import wire
from shared.logs import RateLimitedLogger
from shared.network.curve import EngineKeyFiles

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S, IDLE_PROBE_INTERVAL_S = 1.0, 3.0  # the second while nothing is asked of it


class StoreClient:
    """Fetches and stores ``blocks``, and for models with recurrent state ``states``.

    ``on_fetched(ticket, payloads, end)`` is called on the IO thread once per `fetch`, and
    ``on_stores_answered`` when there is room for more, with everything passed to `store` that was
    not stored. ``wake`` makes the IO thread call `tick` soon, which it does at least once per
    second anyway. ``timeout_s`` is how long the kvstore, or its disk, may be silent."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        blocks: FileKind,
        pool: ThreadPoolExecutor,
        on_fetched: OnFetched,
        wake: Callable[[], None],
        timeout_s: float = 2.0,
        states: FileKind | None = None,
        keys: EngineKeyFiles | None = None,
        on_stores_answered: Callable[[list[tuple[bytes, bool]]], None] = lambda _: None,
    ) -> None:
        self._blocks = blocks
        self._states = blocks if states is None else states
        self._pool = pool
        self._on_fetched, self._on_stores_answered = on_fetched, on_stores_answered
        self._wake = wake
        self._timeout_s = timeout_s
        self._actions: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._tickets = count(1)
        self._session: Literal["away", "connected", "locating", "ready"] = "away"
        self._connected_at = 0.0
        self._unresponsive = False
        self._probed_at: float | None = None
        self._next_probe_at = 0.0
        self._finds_last = False  # whether the kvstore supports `wire.FindLast`
        self._questions = Questions(lambda message: self._finds_last and self._send(message))
        self._requested: dict[int, BlockFetch] = {}
        self._reading: set[BlockFetch] = set()
        self._waiting: list[BlockFetch] = []
        self._counters = StoreCounters()
        self._puts = BlockPuts(pool, self._counters, self._post, self._send_once_ready)
        self._clear = CacheClear({blocks.namespace, self._states.namespace}, self._send_once_ready)
        self._warnings = RateLimitedLogger(logger)
        self._reader = BlockReader(pool, self._warnings, self._on_bad_block, self._on_reply)
        self._socket = StoreSocket(context, endpoint, keys)
        self.socket = self._socket.dealer
        self.sockets = (self.socket,)

    @property
    def stats(self) -> StoreClientStats:
        return self._counters.stats

    @property
    def is_ready(self) -> bool:
        """Whether the kvstore is connected and responds. If not, no block is worth exporting."""
        return self._session == "ready" and not self._unresponsive

    def fetch(
        self,
        ticket: int,
        hashes: Sequence[bytes],
        end: StateSearch | PartSearch | None = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        """Fetch the longest run of verified blocks starting at the first hash, and what is searched
        at their ``end``: a part of the next page, or the last state that they reach. With a state,
        only the blocks up to it.

        ``on_fetched`` gets their payloads; there are none if the kvstore is unavailable."""
        self._post(start_of(self, ticket, hashes, end, self._on_fetched, cancellation))

    def store(
        self, hash: bytes, payload: Sequence[bytes | memoryview], is_state: bool = False
    ) -> bool:
        """Send a block or a state to the kvstore, if it is connected and the limits leave room.

        Return False if it must be offered again; True is not a guarantee. The buffers are read on
        the pool, so they must not change.
        """
        if not self.is_ready:
            self._counters.add(drops=1)
            return False
        kind = self._states if is_state else self._blocks
        return self._puts.store(hash, kind, payload, is_state=is_state)

    def room(self) -> StoreRoom:
        """Return what `store` would accept now."""
        return self._puts.room(time.monotonic()) if self.is_ready else StoreRoom(0, 0)

    @property
    def num_stores_under_way(self) -> int:
        return self._puts.num_under_way

    def touch(self, blocks: Sequence[bytes], states: Sequence[bytes] = ()) -> None:
        """Tell the kvstore that blocks, and states, are in use: those of each up to the first that
        it lacks."""
        for kind, hashes in ((self._blocks, blocks), (self._states, states)):
            if hashes:
                self._post_if_ready(wire.Touch(namespace=kind.namespace, hashes=list(hashes)))

    def clear(self) -> None:
        """Remove all blocks and states of this engine's kind, once the kvstore is there."""
        self._puts.clear()
        self._post(self._clear.request)

    def tick(self, now: float) -> None:
        """Run posted actions, timeouts and probes. ``now`` is time.monotonic()."""
        self._poll_connection()
        if self._socket.tick(now, is_idle=not self._has_questions):
            self._on_disconnected()
        self._clear.send()
        with suppress(Empty):
            while True:
                self._actions.get_nowait()()
        read_until = self._reader.last_read_at + self._timeout_s
        for fetch in [*self._waiting, *self._requested.values(), *self._reading]:
            is_read = fetch in self._reading
            if now >= max(fetch.deadline, read_until if is_read else 0.0):
                self._unresponsive = self._unresponsive or not is_read
                self._give_up(fetch)
        self._unresponsive = self._questions.expire(now) or self._unresponsive
        self._puts.expire(now)
        if (not_stored := self._puts.take_not_stored()) is not None:
            self._on_stores_answered(not_stored)
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
                self._warnings.warning("dropped an invalid message from the kvstore: %s", error)
                continue
            match message:
                case wire.Nonce(path=path, finds_last=finds_last):
                    self._finds_last = finds_last
                    self._pool.submit(self._read_nonce, path)
                case wire.GetReply():
                    self._on_get_reply(message, payload)
                case wire.HasReply(ticket=ticket, count=count):
                    self._questions.answer(ticket, count)
                case wire.FindLastReply(ticket=ticket, position=position):
                    self._questions.answer(ticket, position)
                case wire.PutReply(ticket=ticket, stored=stored):
                    self._puts.finish(ticket, stored=stored)
                case wire.StoreStatsReply(stats=stats):
                    self._probed_at = None
                    self._clear.on_probe_answered(is_clearing=stats.is_clearing)
                    self._counters.set_store(stats)

    def close(self) -> None:
        """Answer every open fetch with the blocks it has so far. Called on the IO thread."""
        self._on_disconnected()
        self.tick(time.monotonic())
        for fetch in list(self._reading):
            self._give_up(fetch)
        self._socket.close()

    # -- the connection, on the IO thread --------------------------------------

    def _poll_connection(self) -> None:
        for is_connected in self._socket.changes():
            if is_connected:
                self._session = "connected"
                self._connected_at = time.monotonic()
            else:
                self._on_disconnected()
        if self._session == "connected" and self._send(wire.Locate()):
            self._session = "locating"

    def _on_disconnected(self) -> None:
        if self._session == "ready":
            logger.info("lost the kvstore; its blocks count as misses until it is back")
        self._session = "away"
        self._unresponsive = False
        self._probed_at, self._next_probe_at = None, 0.0
        self._counters.set_store(None)
        for fetch in [*self._waiting, *self._requested.values()]:
            self._give_up(fetch)
        self._clear.on_disconnected()
        self._questions.drop_all()
        self._puts.drop_all()

    def _read_nonce(self, path: str) -> None:
        """Read the kvstore's nonce, if ``path`` is a file of this machine. Runs on the pool."""
        nonce = ""
        with suppress(OSError, UnicodeDecodeError):
            nonce = block_fetch.read_file(path, 1024).decode()
        self._post(lambda: self._on_nonce_read(nonce))

    def _on_nonce_read(self, nonce: str) -> None:
        if self._session in ("locating", "ready") and self._send(wire.Located(nonce=nonce)):
            if self._session != "ready":
                how = "reading its files directly" if nonce else "receiving blocks over the wire"
                logger.info("connected to the kvstore, %s", how)
            self._session = "ready"
            self._clear.send()  # before anything is asked
            self._questions.send_waiting()
            waiting, self._waiting = self._waiting, []
            for fetch in waiting:
                self._request(fetch)

    @property
    def _has_questions(self) -> bool:
        return bool(self._requested or self._waiting or self._reading or self._puts.num_under_way)

    def _probe(self, now: float) -> None:
        if self._probed_at is not None and now - self._probed_at > self._timeout_s:
            if not self._unresponsive:
                why = "the kvstore does not respond; its blocks are misses until it does"
                self._warnings.warning(why)
            self._unresponsive = True
        if self._session != "away" and self._probed_at is None and now >= self._next_probe_at:
            is_asked = self._has_questions
            self._next_probe_at = now + (PROBE_INTERVAL_S if is_asked else IDLE_PROBE_INTERVAL_S)
            if self._send(wire.StoreStatsWanted()):
                self._probed_at = now

    def _send(self, message: wire.Message, *payload: bytes) -> bool:
        try:
            self.socket.send_multipart(wire.encode(message, *payload), zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # EAGAIN: the kvstore is gone or accepts nothing more
            return False
        return True

    def _send_once_ready(self, message: wire.Message, *payload: bytes) -> bool:
        return self._session == "ready" and self._send(message, *payload)

    def _post_if_ready(self, message: wire.Message) -> None:
        self._post(lambda: self._send(message) if self.is_ready else None)

    def _post(self, action: Callable[[], object]) -> None:
        self._actions.put(action)
        self._wake()

    # -- fetches, on the IO thread ---------------------------------------------

    def count_blocks(self, hashes: Sequence[bytes], on_done: Callable[[int | None], None]) -> None:
        """Ask how many of ``hashes`` are stored without a gap. None: the kvstore is unavailable."""
        namespace = self._blocks.namespace
        self._ask(
            lambda ticket: wire.Has(ticket=ticket, namespace=namespace, hashes=list(hashes)),
            on_done,
        )

    def find_last(
        self, hashes: Sequence[bytes], on_done: Callable[[int | None], None], *, are_states: bool
    ) -> None:
        """Ask for the position of the last of ``hashes`` that is stored, None if none is."""
        namespace = (self._states if are_states else self._blocks).namespace
        self._ask(
            lambda ticket: wire.FindLast(ticket=ticket, namespace=namespace, hashes=list(hashes)),
            on_done,
        )

    def get_blocks(
        self,
        hashes: Sequence[bytes],
        on_done: Callable[[list[Payload]], None],
        cancellation: Cancellation | None = None,
    ) -> None:
        self._request(BlockFetch(self._blocks, tuple(hashes), on_done, cancellation))

    def get_state(self, hash: bytes, on_done: Callable[[list[Payload]], None]) -> None:
        self._request(BlockFetch(self._states, (hash,), on_done))

    def _ask(self, make: Callable[[int], Question], on_done: Callable[[int | None], None]) -> None:
        deadline = time.monotonic() + self._timeout_s
        connecting = self._session in ("connected", "locating")
        if not connecting and not self.is_ready:
            on_done(None)
            return
        self._questions.ask(make, on_done, deadline=deadline, now=not connecting)

    def _request(self, fetch: BlockFetch) -> None:
        """Request all blocks that ``fetch`` still lacks."""
        rest = list(fetch.hashes[len(fetch.payloads) :])
        fetch.deadline = time.monotonic() + self._timeout_s
        if not rest or self._unresponsive or self._session == "away":
            self._finish(fetch)
        elif self._session != "ready":
            if time.monotonic() - self._connected_at < self._timeout_s:
                self._waiting.append(fetch)
            else:
                self._finish(fetch)
                self._warnings.warning(
                    "the kvstore refused this engine, so nothing is cached on SSD; see its log for "
                    "the reason, such as another version of the protocol"
                )
        else:
            ticket = next(self._tickets)
            self._requested[ticket] = fetch
            fetch.get_ticket = ticket
            if not self._send(wire.Get(ticket=ticket, namespace=fetch.kind.namespace, hashes=rest)):
                self._give_up(fetch)

    def _on_get_reply(self, message: wire.GetReply, frames: Sequence[bytes]) -> None:
        fetch = self._requested.pop(message.ticket, None)
        if fetch is None:
            return  # abandoned
        sources: Sequence[str | bytes] = frames if message.paths is None else message.paths
        sources = sources[: len(fetch.hashes) - len(fetch.payloads)]
        if not sources:
            self._finish(fetch)
            return
        self._reading.add(fetch)
        fetch.deadline = time.monotonic() + self._timeout_s
        self._reader.read(FetchReply(fetch, sources, may_be_cut=message.paths is None))

    def _on_bad_block(self, reply: FetchReply, index: int) -> None:
        namespace = reply.fetch.kind.namespace
        self._post_if_ready(wire.Corrupt(namespace=namespace, hash=reply.hash_of(index)))
        self._counters.add(corrupt=1)

    def _on_reply(self, reply: FetchReply) -> None:
        self._post(lambda: self._on_reply_read(reply))

    def _on_reply_read(self, reply: FetchReply) -> None:
        """Finish the fetch, or request the rest of its blocks."""
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
        self._counters.add(reads=len(fetch.payloads), read_bytes=size)
        fetch.on_done(fetch.payloads)
