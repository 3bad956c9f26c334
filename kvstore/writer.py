"""Writing blocks in the background, from a bounded queue."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.directory import DISK_FULL, BlockKey
from kvstore.store import DiskStore
from shared.blockfile import BlockFileError
from shared.logs import RateLimitedLogger

MAX_QUEUED_BYTES = 512 * 1024 * 1024
FULL_DISK_PAUSE_S = 1.0
"""Once the disk was full, writes are dropped for this long; the next one tries again."""

_RETRY_PAUSE_S = 0.1
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingWrite:
    """A block to write."""

    key: BlockKey
    data: bytes
    # Called on the writer's thread with the reason why the block was not stored, or with ""
    # once it is on the disk.
    on_done: Callable[[str], None]


class Writer:
    """A thread that writes blocks to ``store``.

    A ``persistent`` writer syncs to the device, retries ``max_retries`` times, and its `offer`
    waits for room. Otherwise a full queue or an error drops the block (best effort).
    Without ``in_background``, `offer` writes the block before it returns.
    """

    def __init__(
        self,
        store: DiskStore,
        *,
        persistent: bool = False,
        in_background: bool = True,
        queue_size: int = 512,
        max_retries: int = 3,
        flush_interval_s: float = 1.0,
    ) -> None:
        self.persistent = persistent
        self.in_background = in_background
        self._store = store
        self._queue_size = queue_size
        self._max_retries = max_retries if persistent else 0
        self._flush_interval_s = max(flush_interval_s, 0.05)
        self._condition = threading.Condition()
        self._puts: deque[PendingWrite] = deque()
        self._verifications: deque[BlockKey] = deque(maxlen=queue_size)
        self._queued_bytes = 0
        self._drops = 0
        self._stopping = False
        self._deadline = float("inf")
        self._full_until = float("-inf")
        self._drop_log = RateLimitedLogger(logger)
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    @property
    def drops(self) -> int:
        with self._condition:
            return self._drops

    def offer(self, put: PendingWrite, wait_s: float = 0.0) -> str:
        """Take a block to write, and return "", or return why it was not taken.

        Reasons: the queue has no room within ``wait_s``, or the disk is full. ``put.on_done`` is
        called only if the block is taken.
        """
        with self._condition:
            if time.monotonic() < self._full_until:
                return self._drop("the disk is full")
            if self.in_background:
                if not self._condition.wait_for(self._has_room, wait_s):
                    return self._drop("the writer is behind")
                self._puts.append(put)
                self._queued_bytes += len(put.data)
                self._condition.notify_all()
                return ""
        put.on_done(self._write(put))
        return ""

    def verify(self, key: BlockKey) -> None:
        """Queue the check of a block that was reported as bad.

        A full queue drops the oldest report; the next reader of that block repeats it.
        """
        with self._condition:
            self._verifications.append(key)
            self._condition.notify_all()

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for about ``timeout_s`` at most, and stop."""
        with self._condition:
            self._stopping = True
            self._deadline = time.monotonic() + timeout_s
            self._condition.notify_all()
        self._thread.join(timeout_s + 1.0)

    def _has_room(self) -> bool:
        return len(self._puts) < self._queue_size and self._queued_bytes < MAX_QUEUED_BYTES

    def _run(self) -> None:
        next_flush = time.monotonic()
        while True:
            with self._condition:
                self._condition.wait_for(self._has_work, max(0.0, next_flush - time.monotonic()))
                put = self._puts.popleft() if self._puts else None
                verification = self._verifications.popleft() if self._verifications else None
                stopping = self._stopping
                late = time.monotonic() >= self._deadline
            idle = not (put or verification)
            try:
                if put:
                    put.on_done(self._drop("shutting down") if late else self._write(put))
                if verification and not late:
                    self._store.verify(verification)
                if (stopping and idle) or time.monotonic() >= next_flush:
                    self._store.flush()
                    next_flush = time.monotonic() + self._flush_interval_s
            except Exception:
                logger.exception("a bug in the writer, which goes on")
                next_flush = time.monotonic() + self._flush_interval_s
            if put:
                with self._condition:
                    self._queued_bytes -= len(put.data)
                    self._condition.notify_all()
            elif stopping and idle:
                return

    def _has_work(self) -> bool:
        return bool(self._puts or self._verifications or self._stopping)

    def _write(self, put: PendingWrite) -> str:
        """Return why the block could not be written; "" if it was."""
        for attempt in range(self._max_retries + 1):
            try:
                self._store.put(put.key, put.data, durable=self.persistent)
                return ""
            except BlockFileError as error:
                return self._drop(f"not a block file: {error}")
            except OSError as error:
                if error.errno in DISK_FULL:
                    with self._condition:
                        self._full_until = time.monotonic() + FULL_DISK_PAUSE_S
                    return self._drop("the disk is full")
                reason = f"cannot write: {errno.errorcode.get(error.errno or 0, error)}"
            if attempt < self._max_retries:
                time.sleep(_RETRY_PAUSE_S * 2**attempt)
        return self._drop(reason)

    def _drop(self, reason: str) -> str:
        with self._condition:
            self._drops += 1
            drops = self._drops
        self._drop_log.warning("a block was not stored, %s (%d so far)", reason, drops)
        return reason
