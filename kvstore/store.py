"""The blocks on disk and their eviction: keeps index and files consistent."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Callable, Sequence

from kvstore.clock import StoreClock
from kvstore.directory import BlockDirectory, BlockKey
from kvstore.disk import DISK_FULL, OF_NO_FILE
from kvstore.health import DiskHealth
from kvstore.index import LruIndex
from kvstore.space import DiskSpace, NoRoom
from shared.blockfile import BlockFileError, decode
from shared.wire import StoreStats

CLOCK_INTERVAL_S = 60.0
"""How often the clock is saved: at most this much time is lost in a crash."""

_AGE_PER_POSITION_S = 1e-6
"""Each block of a chain counts as this much older than the previous one. The rest of a chain is
useless without its first blocks, so these are evicted last."""
_OF_ONE_FILE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EISDIR, errno.ENOTEMPTY)
"""Errors that concern one file and not the whole disk."""
_RETRIED_REMOVALS = 8
logger = logging.getLogger(__name__)


class BlockTooLarge(Exception):
    """A block larger than the limit for all blocks."""


class DiskStore:
    """Blocks by key, evicted by age, total size and free disk space.

    Safe to use from several threads, but `put`, `verify` and `flush` from one at a time; file
    operations run outside the lock.

    ``max_bytes`` and ``ttl_s`` 0 mean no limit. `put` makes room before it writes, so that the
    limits hold at all times. Until `load` has run, blocks are looked up on the disk, nothing is
    evicted, and nothing should be put, because the total size is unknown.
    """

    def __init__(
        self,
        directory: BlockDirectory,
        *,
        max_bytes: int = 0,
        reserve_bytes: int = 0,
        ttl_s: float = 0.0,
        clock: StoreClock | None = None,
    ) -> None:
        """``reserve_bytes`` are left free on the disk. ``clock`` defaults to the directory's."""
        self._directory = directory
        self._ttl_s = ttl_s
        self._clock = clock or StoreClock(directory.read_clock())
        self._next_clock_save = float("-inf")
        self._space = DiskSpace(directory.free_bytes, max_bytes, reserve_bytes)
        self.health = DiskHealth()
        self.hidden: frozenset[str] = frozenset()
        """Namespaces whose blocks count as missing, because they are about to be cleared."""
        self._lock = threading.Lock()
        self._index = LruIndex()
        self._unremoved: dict[BlockKey, int] = {}
        """Sizes of evicted and bad blocks whose files could not be deleted. They count as misses,
        and against the limit until they are gone."""
        self._is_gone = False  # whether the directory is
        self._refused_bytes = 0  # size of the last block that did not fit on the disk
        self._unsaved_use_times: dict[BlockKey, float] = {}
        self._reads = self._misses = self._writes = 0
        self._corrupt = self._evicted = self._expired = 0

    @property
    def is_loaded(self) -> bool:
        with self._lock:
            return self._index.is_complete

    def load(self) -> None:
        """Rebuild the index from the directory; may run concurrently with everything else. Raises:
        an OSError of `OF_NO_FILE`."""
        scanned = LruIndex.of(self._directory.scan(), self._clock())
        with self._lock:
            self._index.complete(scanned)

    def has(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of ``keys`` are stored, up to the first missing one."""
        for count, key in enumerate(keys):
            if self._size_of(key) is None:
                return count
        return len(keys)

    def find_last(self, keys: Sequence[BlockKey]) -> int | None:
        """Return the position of the last of ``keys`` that is stored, or None."""
        for position in range(len(keys) - 1, -1, -1):
            if self._size_of(keys[position]) is not None:
                return position
        return None

    def get(self, keys: Sequence[BlockKey]) -> list[str]:
        """Return the paths of the blocks up to the first missing one, and mark them as used.

        The files are not verified; the reader does that, and `verify`.
        """
        found = self.touch(keys)
        with self._lock:
            self._reads += found
            self._misses += found < len(keys)
        return [str(self._directory.path(key)) for key in keys[:found]]

    def read(self, key: BlockKey) -> bytes | None:
        """Return the unverified content of the file; None if it cannot be read."""
        try:
            return self._directory.read(key)
        except OSError:
            return None

    def touch(self, keys: Sequence[BlockKey]) -> int:
        """Mark the blocks of a chain, given from its start, as most recently used, up to the first
        missing one. Return their number."""
        sizes = list(itertools.takewhile(lambda size: size is not None, map(self._size_of, keys)))
        now = self._clock()
        for position in range(len(sizes) - 1, -1, -1):
            size = sizes[position]
            assert size is not None
            with self._lock:  # once per block, so that no other thread waits for a long chain
                self._record_use(keys[position], size, now - position * _AGE_PER_POSITION_S)
        return len(sizes)

    def put(self, key: BlockKey, data: bytes, durable: bool) -> None:
        """Store a block file. If the block is already stored, only mark it as used.

        Raises: `BlockFileError` if ``data`` is not that block, `BlockTooLarge`, OSError if the disk
        fails or is full.
        """
        if self.touch([key]):
            if durable:
                self._directory.sync(key)
            return
        decode(data, key.hash, key.namespace)
        if 0 < self._space.max_bytes < len(data):
            raise BlockTooLarge(f"{len(data)} bytes")
        self._refused_bytes = len(data)
        self._make_room(len(data), key.namespace)
        try:
            self._write(key, data, durable)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            with self._lock:
                self._space.shrink(self._used_bytes(), len(data))
            self._make_room(len(data), key.namespace)
            self._write(key, data, durable)

    def verify(self, key: BlockKey) -> None:
        """Check a block that was reported as bad: quarantine it if that is true, keep it otherwise.

        Raises: OSError if a bad file can be neither moved nor deleted.
        """
        try:
            data = self._directory.read(key)
        except OSError as error:
            if error.errno in OF_NO_FILE:
                return
            data = None
        if data is not None:
            try:
                decode(data, key.hash, key.namespace)
                return
            except BlockFileError as error:
                logger.warning("block %s is corrupt: %s", self._directory.path(key), error)
            size, remove = len(data), self._directory.quarantine
        else:
            info = self._directory.info(key)
            if info is None:  # removed by someone else
                with self._lock:
                    self._forget(key)
                return
            logger.warning("cannot read block %s", self._directory.path(key))
            size, remove = info.size, self._directory.remove
        with self._lock:
            self._corrupt += 1
        self._remove(key, size, remove, is_bad=True)

    def clear(self, namespace: str) -> None:
        """Delete all blocks of ``namespace``. Raises: OSError if a file cannot be deleted; the rest
        is, and it is not found any more."""
        with self._lock:
            known = self._index.blocks_of(namespace) if self._index.is_complete else None
        found = self._directory.scan_namespace(namespace) if known is None else known
        failed = None
        for key, info in found:
            try:
                self._remove(key, info.size, self._directory.remove, is_bad=True)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def flush(self) -> None:
        """Write the times of use to the disk, evict blocks over the limits, and check a failed
        disk."""
        if not self._is_directory_there():
            return
        with self._lock:
            uses, self._unsaved_use_times = self._unsaved_use_times, {}
        for key, at in uses.items():
            self._directory.set_last_used(key, at)
        self._save_clock()
        if not self.health.may_try():
            return
        try:
            self._retry_removals()
            if self.health.state == "ok":
                self._make_room(0)
            else:
                self._make_room(self._refused_bytes)
                self._directory.check_writable(self._refused_bytes)
                self.health.worked()
        except OSError as error:
            self.health.failed(error)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                blocks=len(self._index),
                bytes=self._used_bytes(),
                limit_bytes=self._space.limit_bytes() or 0,
                indexing=not self._index.is_complete,
                is_clearing=bool(self.hidden),
                state=self.health.state,
                disk_errors_total=self.health.errors,
                reads_total=self._reads,
                writes_total=self._writes,
                misses_total=self._misses,
                corrupt_total=self._corrupt,
                evicted_total=self._evicted,
                expired_total=self._expired,
            )

    # -- inside ----------------------------------------------------------------

    def _size_of(self, key: BlockKey) -> int | None:
        """Return the size of the block, None if it is not stored.

        The disk decides; a complete index only saves look-ups of missing blocks.
        """
        with self._lock:
            known = key in self._index
            is_removed = key.namespace in self.hidden or key in self._unremoved
            if is_removed or self._index.lacks(key):
                return None
        info = self._directory.info(key)
        if info is None and known:
            with self._lock:
                self._forget(key)
        if info is None or (not known and self._is_expired(info.last_used)):
            return None
        return info.size

    def _write(self, key: BlockKey, data: bytes, durable: bool) -> None:
        at = self._clock()
        self._directory.write(key, data, at, durable)
        self._space.written(len(data))
        with self._lock:
            self._writes += 1
            self._unremoved.pop(key, None)
            self._index.record_use(key, len(data), at)

    def _make_room(self, incoming_bytes: int, namespace: str | None = None) -> None:
        """Evict blocks until the limits hold including a new block of ``namespace``.

        Raises: `NoRoom` if that is impossible, OSError if a file cannot be deleted.
        """
        disk_bytes = self._space.shortfall(incoming_bytes)
        with self._lock:
            if not self._index.is_complete:
                return
            limit_bytes = self._space.limit_bytes()
        if disk_bytes > 0 or self._over_bytes(limit_bytes, incoming_bytes) > 0:
            disk_bytes -= self._directory.quarantined_bytes
            self._directory.empty_quarantine()
        while True:
            over_bytes = max(disk_bytes, self._over_bytes(limit_bytes, incoming_bytes))
            with self._lock:
                found = self._index.oldest()
                expired = found is not None and self._is_expired(found[1].last_used)
                if over_bytes > 0 and not expired:
                    now = self._clock()
                    found = self._index.next_to_evict(namespace, incoming_bytes, now)
            if found is not None and (expired or over_bytes > 0):
                key, info = found
                self._remove(key, info.size, self._directory.remove)
                disk_bytes -= info.size
                with self._lock:
                    self._expired += expired
                    self._evicted += not expired
            elif over_bytes > 0 and incoming_bytes:
                raise NoRoom
            else:
                return

    def _over_bytes(self, limit_bytes: int | None, incoming_bytes: int) -> int:
        """Return by how much a new block exceeds the limit for all files."""
        if limit_bytes is None:
            return 0
        with self._lock:
            used_bytes = self._used_bytes()
        return used_bytes + incoming_bytes - max(limit_bytes, incoming_bytes)

    def _remove(
        self, key: BlockKey, size: int, remove: Callable[[BlockKey], None], *, is_bad: bool = False
    ) -> None:
        """Forget a block and ``remove`` its file. Raises: OSError if that fails.

        A file that cannot be deleted is remembered, unless the whole disk fails and the block is
        not bad: then it stays as it was.
        """
        try:
            remove(key)
        except OSError as error:
            if error.errno in _OF_ONE_FILE or is_bad:
                with self._lock:
                    self._forget(key)
                    self._unremoved[key] = size
            raise
        self._space.removed(size)
        with self._lock:
            self._unremoved.pop(key, None)
            self._forget(key)

    def _save_clock(self) -> None:
        now = self._clock()
        if now >= self._next_clock_save:
            self._next_clock_save = now + CLOCK_INTERVAL_S
            self._directory.write_clock(self._clock.saved(), now)

    def _retry_removals(self) -> None:
        with self._lock:
            again = list(itertools.islice(self._unremoved.items(), _RETRIED_REMOVALS))
        for key, size in again:
            try:
                self._directory.remove(key)
            except OSError:
                with self._lock:  # after the others
                    self._unremoved[key] = self._unremoved.pop(key)
            else:
                self._space.removed(size)
                with self._lock:
                    del self._unremoved[key]

    def _used_bytes(self) -> int:
        """Return the size of our files. The caller holds the lock."""
        return self._index.bytes + sum(self._unremoved.values()) + self._directory.quarantined_bytes

    def _is_directory_there(self) -> bool:
        """Return whether the directory exists. If it is gone, forget its blocks, and use it again
        when it is back."""
        there = self._directory.is_there()
        if there and not self._is_gone:
            return True
        if not self._is_gone:
            self._is_gone = True
            self.health.failed(FileNotFoundError(errno.ENOENT, str(self._directory.root)))
            with self._lock:
                self._clear(is_complete=True)
        if not there and not self._directory.reopen():
            return False
        with self._lock:
            self._clear(is_complete=False)
        try:
            self.load()
        except OSError:
            return False
        self._is_gone = False
        self.health.worked()
        return True

    def _clear(self, *, is_complete: bool) -> None:
        self._index = LruIndex()
        self._index.is_complete = is_complete
        self._unremoved.clear()
        self._unsaved_use_times.clear()

    def _record_use(self, key: BlockKey, size: int, at: float) -> None:
        if not self._index.lacks(key):  # otherwise it was removed since it was looked up
            self._index.record_use(key, size, at)
            self._unsaved_use_times[key] = at

    def _forget(self, key: BlockKey) -> None:
        self._index.remove(key)
        self._unsaved_use_times.pop(key, None)

    def _is_expired(self, last_used: float) -> bool:
        return 0 < self._ttl_s < self._clock() - last_used
