"""Writes blocks in the background, from a bounded queue."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvstore.directory import BlockKey
from kvstore.disk import DISK_FULL
from kvstore.queue import PendingWrite, WriteQueue
from kvstore.store import BlockTooLarge, DiskStore
from shared.blockfile import BlockFileError
from shared.logs import RateLimitedLogger

_RETRY_PAUSE_S = 0.1
_MAX_RETRY_PAUSE_S = 1.0
_IDLE_INTERVALS = 5
"""Flush intervals between two flushes while there is nothing to write."""
_NAME_TAKEN = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)
logger = logging.getLogger(__name__)


class Writer:
    """The thread that modifies ``store``: it writes, verifies and evicts blocks.

    A ``persistent`` writer syncs to the device and retries ``max_retries`` times. Otherwise an
    error drops the block (best effort). A full queue always drops blocks: nothing waits for room,
    and an engine limits its unacknowledged blocks.
    """

    def __init__(
        self,
        store: DiskStore,
        *,
        persistent: bool = False,
        queue_size: int = 512,
        max_retries: int = 3,
        flush_interval_s: float = 1.0,
    ) -> None:
        self.persistent = persistent
        self._store = store
        self._max_retries = max_retries if persistent else 0
        self._flush_interval_s = max(flush_interval_s, 0.05)
        self._condition = threading.Condition()
        self._puts = WriteQueue(queue_size)
        self._verifications: deque[BlockKey] = deque(maxlen=queue_size)
        self._to_clear: set[str] = set()
        self._drops = 0
        self._stopping = False
        self._deadline = float("inf")
        self._drop_log = RateLimitedLogger(logger)
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    @property
    def drops(self) -> int:
        with self._condition:
            return self._drops

    def offer(self, put: PendingWrite) -> str:
        """Queue a block for writing and return "", or return the reason why it was rejected.

        Reasons: the queue is full, or the disk accepts no writes. ``put.on_done`` is called only if
        the block is queued. Never waits.
        """
        if refusal := self._store.health.refusal():
            return self._drop(refusal, log=False)
        with self._condition:
            displaced = self._puts.push(put)
            self._condition.notify_all()
        for other in displaced:
            reason = self._drop("the writer is behind")
            if other is put:
                return reason
            other.on_done(reason)
        return ""

    def verify(self, key: BlockKey) -> None:
        """Queue the verification of a block that was reported as bad.

        A full queue drops the oldest report; the next reader of that block repeats it.
        """
        with self._condition:
            self._verifications.append(key)
            self._condition.notify_all()

    def clear(self, namespace: str) -> None:
        """Queue the removal of all blocks of ``namespace``, including those waiting to be written.
        From now on they are not found."""
        with self._condition:
            dropped = self._puts.drop(namespace)
            self._to_clear.add(namespace)
            self._store.hidden |= {namespace}
            self._condition.notify_all()
        for put in dropped:
            put.on_done("cleared")

    def close(self, timeout_s: float) -> None:
        """Write the queued blocks, for at most about ``timeout_s``, and stop."""
        with self._condition:
            self._stopping = True
            self._deadline = time.monotonic() + timeout_s
            self._condition.notify_all()
        self._thread.join(timeout_s + 1.0)

    def _run(self) -> None:
        next_flush = time.monotonic()
        while True:
            with self._condition:
                wait_s = max(0.0, next_flush - time.monotonic())
                if not self._store.is_loaded:
                    wait_s = min(wait_s, 0.1)
                self._condition.wait_for(self._has_work, wait_s)
                loaded = self._store.is_loaded
                late = self._stopping and (not loaded or time.monotonic() >= self._deadline)
                put = self._puts.pop() if loaded or late else None
                verification = self._verifications.popleft() if self._verifications else None
                cleared, self._to_clear = self._to_clear, set()
                stopping = self._stopping
            idle = not (put or verification or cleared)
            if not idle:
                next_flush = min(next_flush, time.monotonic() + self._flush_interval_s)
            try:
                for namespace in cleared:  # all, because `put` came later
                    self._report(partial(self._store.clear, namespace))
                with self._condition:
                    self._store.hidden = frozenset(self._to_clear)
                if put:
                    put.on_done(self._drop("shutting down") if late else self._write(put))
                if verification and not late:
                    self._report(partial(self._store.verify, verification))
                if (stopping and idle) or time.monotonic() >= next_flush:
                    self._store.flush()
                    next_flush = time.monotonic() + self._pause_s(idle)
            except Exception:
                logger.exception("internal error in the writer, which continues")
                next_flush = time.monotonic() + self._flush_interval_s
            if stopping and idle:
                return

    def _pause_s(self, idle: bool) -> float:
        """The time until the next flush. A laptop's idle server should not wake up for nothing."""
        seldom = idle and self._store.is_loaded and self._store.health.state == "ok"
        return self._flush_interval_s * (_IDLE_INTERVALS if seldom else 1)

    def _has_work(self) -> bool:
        # The total size must be known before anything is added.
        has_puts = len(self._puts) > 0 and self._store.is_loaded
        return bool(has_puts or self._to_clear or self._verifications or self._stopping)

    def _report(self, change: Callable[[], None]) -> None:
        """Make a change, and record a failure in the disk's health."""
        try:
            change()
        except OSError as error:
            self._store.health.failed(error)

    def _write(self, put: PendingWrite) -> str:
        """Return the reason if the block could not be written; "" if it was."""
        health = self._store.health
        if refusal := health.refusal():
            return self._drop(refusal, log=False)
        for attempt in range(self._max_retries + 1):
            try:
                self._store.put(put.key, put.data, durable=self.persistent)
                health.worked()
                return ""
            except BlockFileError as error:
                return self._drop(f"not a block file: {error}")
            except BlockTooLarge as error:
                return self._drop(f"larger than the whole tier: {error}")
            except OSError as error:
                failure = error
            if failure.errno in _NAME_TAKEN:
                return self._drop(f"another file has its name: {failure}")
            if failure.errno in DISK_FULL or self._stopping:
                break
            if attempt < self._max_retries:
                time.sleep(min(_RETRY_PAUSE_S * 2**attempt, _MAX_RETRY_PAUSE_S))
        health.failed(failure)
        code = errno.errorcode.get(failure.errno or 0, str(failure))
        return self._drop(f"{health.reason} ({code})", log=False)

    def _drop(self, reason: str, *, log: bool = True) -> str:
        """Count a block that was not stored. The state of the disk has its own log line."""
        with self._condition:
            self._drops += 1
            drops = self._drops
        if log:
            self._drop_log.warning("a block was not stored: %s (%d so far)", reason, drops)
        return reason
