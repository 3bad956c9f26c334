"""The blocks on disk and the order of their eviction: index and files, kept in step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.directory import BlockDirectory, BlockKey
from kvstore.index import LruIndex
from shared.blockfile import BlockFileError, decode
from shared.wire import StoreStats

_AGE_PER_POSITION_S = 1e-6
"""Each block of a chain counts as this much older than the one before it. Without its first
blocks the rest of a chain is useless, so the first are evicted last."""

logger = logging.getLogger(__name__)


class DiskStore:
    """Blocks by key, evicted by age and total size.

    Safe to use from several threads; file operations happen outside of the lock.

    ``max_bytes`` and ``ttl_s`` 0 mean no limit. `flush` and `put` enforce both. Until `load` has
    run, blocks are looked up on the disk and nothing is evicted.
    """

    def __init__(
        self,
        directory: BlockDirectory,
        *,
        max_bytes: int = 0,
        ttl_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._index = LruIndex()
        self._unsaved_use_times: dict[BlockKey, float] = {}
        self._reads = self._misses = self._writes = 0
        self._corrupt = self._evicted = self._expired = 0

    def load(self) -> None:
        """Rebuild the index from the directory; may run concurrently with everything else."""
        scanned = list(self._directory.scan())
        with self._lock:
            self._index.complete(scanned, self._clock())
        self.flush()

    def has(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of ``keys`` are stored, up to the first that is not."""
        for count, key in enumerate(keys):
            if self._size_of(key) is None:
                return count
        return len(keys)

    def get(self, keys: Sequence[BlockKey]) -> list[str]:
        """Return the paths of the blocks up to the first that is missing, and mark them as used.

        The files are not verified: the reader does that, and `verify`.
        """
        found = self.has(keys)
        self.touch(keys[:found])
        with self._lock:
            self._reads += found
            self._misses += found < len(keys)
        return [str(self._directory.path(key)) for key in keys[:found]]

    def read(self, key: BlockKey) -> bytes | None:
        """Return the content of the file, not verified; None if it cannot be read."""
        try:
            return self._directory.read(key)
        except OSError:
            return None

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make the blocks of a chain, given from its start, the most recently used."""
        now = self._clock()
        for position in reversed(range(len(keys))):
            size = self._size_of(keys[position])
            if size is not None:
                at = now - position * _AGE_PER_POSITION_S
                with self._lock:
                    self._index.record_use(keys[position], size, at)
                    self._unsaved_use_times[keys[position]] = at

    def put(self, key: BlockKey, data: bytes, durable: bool) -> None:
        """Store a block file. If the block is stored already, this only counts as a use.

        Raises: `BlockFileError` if ``data`` is not that block, OSError if the disk fails.
        """
        if self._size_of(key) is None:
            decode(data, key.hash, key.namespace)
            self._directory.write(key, data, durable)
            with self._lock:
                self._writes += 1
                self._index.record_use(key, len(data), self._clock())
        else:
            self.touch([key])
        self._make_room()

    def verify(self, key: BlockKey) -> None:
        """Check a block that was reported as bad: quarantine it if it is, keep it if not."""
        data = self.read(key)
        if data is not None:
            try:
                decode(data, key.hash, key.namespace)
                return
            except BlockFileError as error:
                logger.warning("block %s is corrupt: %s", self._directory.path(key), error)
            self._directory.quarantine(key)
        elif self._size_of(key) is not None:
            logger.warning("block %s cannot be read", self._directory.path(key))
            self._directory.remove(key)
        else:
            return
        with self._lock:
            self._corrupt += 1
            self._forget(key)

    def flush(self) -> None:
        """Write the times of use to the disk, and evict what is over the limits."""
        with self._lock:
            uses, self._unsaved_use_times = self._unsaved_use_times, {}
        for key, at in uses.items():
            self._directory.set_last_used(key, at)
        self._make_room()

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                blocks=len(self._index),
                bytes=self._index.bytes,
                limit_bytes=self._max_bytes,
                indexing=not self._index.is_complete,
                reads_total=self._reads,
                writes_total=self._writes,
                misses_total=self._misses,
                corrupt_total=self._corrupt,
                evicted_total=self._evicted,
                expired_total=self._expired,
            )

    def _size_of(self, key: BlockKey) -> int | None:
        """Return the size of the block, None if it is not stored.

        The disk decides; a complete index only saves the look-up of blocks that it lacks.
        """
        with self._lock:
            known = key in self._index
            if not known and self._index.is_complete:
                return None
        info = self._directory.info(key)
        if info is None and known:
            with self._lock:
                self._forget(key)
        if info is None or (not known and self._is_expired(info.last_used)):
            return None
        return info.size

    def _make_room(self) -> None:
        """Evict the least recently used blocks until both limits hold."""
        while True:
            with self._lock:
                oldest = self._index.oldest()
                if oldest is None or not self._index.is_complete:
                    return
                key, info = oldest
                if self._is_expired(info.last_used):
                    self._expired += 1
                elif 0 < self._max_bytes < self._index.bytes:
                    self._evicted += 1
                else:
                    return
                self._forget(key)
            try:
                self._directory.remove(key)
            except OSError as error:
                logger.warning("cannot remove %s: %s", self._directory.path(key), error)

    def _forget(self, key: BlockKey) -> None:
        self._index.remove(key)
        self._unsaved_use_times.pop(key, None)

    def _is_expired(self, last_used: float) -> bool:
        return 0 < self._ttl_s < self._clock() - last_used
