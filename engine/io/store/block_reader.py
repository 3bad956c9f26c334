"""Reads the blocks of the kvstore's replies on a pool of threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from engine.io.store import block_fetch
from engine.io.store.block_fetch import FetchReply, Payload, WrongLayout
from shared.blockfile import BlockFileError
from shared.logs import RateLimitedLogger


class BlockReader:
    """Reads one block of each reply in turn, so that a short fetch does not wait for a long one."""

    def __init__(
        self,
        pool: Executor,
        warnings: RateLimitedLogger,
        on_bad: Callable[[FetchReply, int], None],
        on_read: Callable[[FetchReply], None],
    ) -> None:
        """``on_bad`` is called with a reply and the index of a bad block, and ``on_read`` with a
        reply whose blocks have all been read; both on the pool."""
        self._pool, self._warnings = pool, warnings
        self._on_bad, self._on_read = on_bad, on_read
        self._unread: deque[tuple[FetchReply, int]] = deque()  # replies with their next block
        self._lock = threading.Lock()
        self.last_read_at = 0.0
        """When a block was last read, in time.monotonic()."""

    def read(self, reply: FetchReply) -> None:
        """Read and verify the blocks of ``reply``."""
        with self._lock:
            self._unread.append((reply, 0))
        for _ in reply.sources:
            self._pool.submit(self._read_next)

    def _read_next(self) -> None:
        with self._lock:
            if not self._unread:  # blocks were skipped
                return
            reply, index = self._unread.popleft()
            end = index + 1
            while end < len(reply.sources) and not reply.wants(end):
                end += 1
            if end < len(reply.sources):
                self._unread.append((reply, end))
        payload = self._read(reply, index) if reply.wants(index) else None
        self.last_read_at = time.monotonic()
        is_done = reply.add(index, payload)
        for skipped in range(index + 1, end):
            is_done = reply.add(skipped, None)
        if is_done:
            self._on_read(reply)

    def _read(self, reply: FetchReply, index: int) -> Payload | None:
        try:
            source, hash = reply.sources[index], reply.hash_of(index)
            return block_fetch.read_block(source, hash, reply.fetch.kind)
        except WrongLayout as error:
            self._warnings.warning("ignored a block of another engine: %s", error)
        except (OSError, BlockFileError) as error:
            self._warnings.warning("a bad block: %s", error)
            self._on_bad(reply, index)
        return None
