"""Blocks and states on their way to the kvstore."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from engine.io.block_fetch import FileKind
from engine.io.store_stats import StoreCounters
from shared import wire
from shared.blockfile import MAX_FILE_BYTES, MAX_HEADER_BYTES, encode
from shared.logs import RateLimitedLogger

logger = logging.getLogger(__name__)

MAX_STORES = 256
MAX_STORE_BYTES = 256 * 1024 * 1024
"""Bounds of what is on its way to the kvstore at once. A block beyond them is dropped."""
STORE_TIMEOUT_S = 30.0
MAX_PAYLOAD_BYTES = MAX_FILE_BYTES - MAX_HEADER_BYTES


class BlockPuts:
    """Bounds what is under way. Files are made on ``pool``; ``post`` has an action run on the IO
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

    def store(self, hash: bytes, kind: FileKind, payload: Sequence[bytes | memoryview]) -> bool:
        """Send a file, if the bounds leave room. Return False if it was dropped at once."""
        size = sum(memoryview(buffer).nbytes for buffer in payload)
        if size > MAX_PAYLOAD_BYTES:  # the kvstore would cut the connection
            self._warnings.warning(
                "blocks or states of %d MB are too large to store", size // 10**6
            )
            self._counters.add(drops=1)
            return False
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
            self._pool.submit(self._encode, hash, kind, payload, size)
        except RuntimeError:  # the engine is about to end, and with it the pool
            return False
        return True

    def finish(self, ticket: int, *, stored: bool) -> None:
        """Take in the kvstore's answer. Runs on the IO thread, as do those below."""
        put = self._pending.pop(ticket, None)
        if put is None:
            return
        with self._lock:
            self._num_stores -= 1
            self._store_bytes -= put.payload_bytes
        written_bytes = put.file_bytes if stored else 0
        self._counters.add(writes=stored, drops=not stored, written_bytes=written_bytes)

    def expire(self, now: float) -> None:
        for ticket, put in list(self._pending.items()):
            if now >= put.deadline:
                self.finish(ticket, stored=False)

    def drop_all(self) -> None:
        for ticket in list(self._pending):
            self.finish(ticket, stored=False)

    def _encode(
        self, hash: bytes, kind: FileKind, payload: Sequence[bytes | memoryview], size: int
    ) -> None:
        """Make the file and post it. Runs on the pool."""
        try:
            data = encode(hash, kind.namespace, payload)
        except Exception:
            logger.exception("a block cannot be encoded")
            data = b""
        self._post(lambda: self._put(hash, kind, data, size))

    def _put(self, hash: bytes, kind: FileKind, data: bytes, size: int) -> None:
        """Send a file; empty ``data`` is dropped."""
        ticket = next(self._tickets)
        deadline = time.monotonic() + STORE_TIMEOUT_S
        self._pending[ticket] = _PendingPut(size, len(data), deadline)
        message = wire.Put(ticket=ticket, namespace=kind.namespace, hash=hash)
        if not data or not self._send(message, data):
            self.finish(ticket, stored=False)


@dataclass(frozen=True)
class _PendingPut:
    payload_bytes: int
    file_bytes: int
    deadline: float
