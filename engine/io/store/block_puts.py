"""Blocks and states on their way to the kvstore.

What it refuses is reported and can be offered again. After a refusal, one is sent at a time, at
growing intervals, until one is accepted; the number then doubles each time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from engine.io.store.block_fetch import FileKind
from engine.io.store.stats import StoreCounters
from engine.plan import STORE_LIMIT, StoreRoom
from shared import wire
from shared.blockfile import MAX_FILE_BYTES, MAX_HEADER_BYTES, encode
from shared.logs import RateLimitedLogger

logger = logging.getLogger(__name__)

MAX_STORES, MAX_STORE_BYTES = STORE_LIMIT
"""Max amount on its way to the kvstore at once. Blocks beyond it are refused."""
STORE_TIMEOUT_S = 30.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
"""Interval between attempts while the kvstore refuses everything."""
MAX_ACKNOWLEDGED = 512
"""The size of the kvstore's queue: it may acknowledge blocks in its queue, and lose them."""
MAX_PAYLOAD_BYTES = MAX_FILE_BYTES - MAX_HEADER_BYTES


class BlockPuts:
    """Limits what is in flight. Files are created on ``pool``; ``post`` runs an action on the IO
    thread, where ``send`` sends a message or returns False."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        counters: StoreCounters,
        post: Callable[[Callable[[], object]], None],
        send: Callable[[wire.Message, bytes], bool],
    ) -> None:
        self._pool = pool
        self._counters = counters
        self._post = post
        self._send = send
        self._tickets = count(1)
        self._pending: dict[int, _PendingPut] = {}
        self._lock = threading.Lock()
        self._warnings = RateLimitedLogger(logger)
        self._num_stores = 0
        self._store_bytes = 0
        self._window = MAX_STORES
        self._pause_s = MIN_PAUSE_S
        self._paused_until = 0.0
        self._acknowledged: OrderedDict[int, tuple[bytes, bool]] = OrderedDict()
        self._not_stored: list[tuple[bytes, bool]] = []
        self._has_replies = False
        self._clears = 0

    @property
    def num_under_way(self) -> int:
        return self._num_stores

    def room(self, now: float) -> StoreRoom:
        """Return what should be passed to `store` at ``now`` (time.monotonic())."""
        with self._lock:
            if now < self._paused_until:
                return StoreRoom(0, 0)
            most = MAX_STORE_BYTES if self._num_stores else MAX_STORE_BYTES + MAX_PAYLOAD_BYTES
            return StoreRoom(max(0, self._window - self._num_stores), most - self._store_bytes)

    def take_not_stored(self) -> list[tuple[bytes, bool]] | None:
        """Return what was not stored since the last call: hashes, and whether each is a state. None
        if there were no replies. Runs on the IO thread."""
        if not self._has_replies:
            return None
        found, self._not_stored, self._has_replies = self._not_stored, [], False
        return found

    def store(
        self,
        hash: bytes,
        kind: FileKind,
        payload: Sequence[bytes | memoryview],
        *,
        is_state: bool = False,
    ) -> bool:
        """Send a file. Return False if the limits leave no room for it."""
        size = sum(memoryview(buffer).nbytes for buffer in payload)
        if size > MAX_PAYLOAD_BYTES:  # the kvstore would drop the connection
            self._warnings.warning(
                "blocks or states of %d MB are too large to store", size // 10**6
            )
            self._counters.add(drops=1)
            return True  # offering it again would be useless
        with self._lock:
            is_full = self._num_stores >= MAX_STORES or (
                self._num_stores > 0 and self._store_bytes + size > MAX_STORE_BYTES
            )
            if not is_full:
                self._num_stores += 1
                self._store_bytes += size
        if is_full:
            self._counters.add(drops=1)
            return False
        try:
            self._pool.submit(self._encode, hash, kind, payload, is_state, self._clears)
        except RuntimeError:  # the engine is about to exit, and the pool with it
            return False
        return True

    def clear(self) -> None:
        """Drop what has not been sent yet."""
        self._clears += 1

    def finish(self, ticket: int, *, stored: bool) -> None:
        """Process the kvstore's reply. Runs on the IO thread, like the methods below."""
        put = self._pending.pop(ticket, None)
        if put is None:
            if not stored and (lost := self._acknowledged.pop(ticket, None)) is not None:
                self._refused(*lost)  # it was acknowledged before it was written
                self._counters.add(drops=1)
            return
        self._release(put)
        if stored:
            self._arrived(ticket, put)
        else:
            self._refused(put.hash, put.is_state)
        written_bytes = put.file_bytes if stored else 0
        self._counters.add(writes=stored, drops=not stored, written_bytes=written_bytes)

    def expire(self, now: float) -> None:
        for ticket, put in list(self._pending.items()):
            if now >= put.deadline:
                self.finish(ticket, stored=False)

    def drop_all(self) -> None:
        """Assume that nothing in flight will be stored, nor anything not known to be written."""
        for ticket in list(self._pending):
            self.finish(ticket, stored=False)
        self._not_stored += self._acknowledged.values()
        self._has_replies = True
        self._acknowledged.clear()
        with self._lock:  # another kvstore may accept everything
            self._window, self._pause_s, self._paused_until = MAX_STORES, MIN_PAUSE_S, 0.0

    def _release(self, put: _PendingPut) -> None:
        with self._lock:
            self._num_stores -= 1
            self._store_bytes -= put.payload_bytes

    def _arrived(self, ticket: int, put: _PendingPut) -> None:
        self._has_replies = True
        self._acknowledged[ticket] = put.hash, put.is_state
        if len(self._acknowledged) > MAX_ACKNOWLEDGED:
            self._acknowledged.popitem(last=False)
        with self._lock:
            self._window = min(2 * self._window, MAX_STORES)
            self._pause_s = MIN_PAUSE_S

    def _refused(self, hash: bytes, is_state: bool) -> None:
        self._has_replies = True
        self._not_stored.append((hash, is_state))
        now = time.monotonic()
        with self._lock:
            self._window = 1
            if now >= self._paused_until:  # not one of many that were refused together
                self._paused_until = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _encode(
        self,
        hash: bytes,
        kind: FileKind,
        payload: Sequence[bytes | memoryview],
        is_state: bool,
        clears: int,
    ) -> None:
        """Create the file and post it. ``clears``: the number of calls of `clear` before. Runs on
        the pool."""
        try:
            data = encode(hash, kind.namespace, payload)
        except Exception:
            logger.exception("failed to encode a block")
            data = b""
        size = sum(memoryview(buffer).nbytes for buffer in payload)
        deadline = time.monotonic() + STORE_TIMEOUT_S
        put = _PendingPut(hash, is_state, size, len(data), deadline)
        self._post(lambda: self._put(put, kind.namespace, data, clears))

    def _put(self, put: _PendingPut, namespace: str, data: bytes, clears: int) -> None:
        """Send a file. Empty ``data`` is dropped, and so is what was cleared meanwhile."""
        ticket = next(self._tickets)
        self._pending[ticket] = put
        message = wire.Put(ticket=ticket, namespace=namespace, hash=put.hash)
        if not data:
            self._release(self._pending.pop(ticket))
            self._counters.add(drops=1)
        elif clears != self._clears or not self._send(message, data):
            self.finish(ticket, stored=False)


@dataclass(frozen=True)
class _PendingPut:
    hash: bytes
    is_state: bool
    payload_bytes: int
    file_bytes: int
    deadline: float
