"""The directory of ``--batch-dir``: its lock, its database, its files, and the threads that use
them.

File names are ids generated here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from router.batches.store import BatchStore, Result, StorageFailed, storage_failed
from shared.locks import try_lock
from shared.logs import RateLimitedLogger

logger = logging.getLogger(__name__)

AGAIN_S = 2.0
"""What the disk did not take is tried again after this long."""
_READERS = 4
_LOG_INTERVAL_S = 5.0
_Result = TypeVar("_Result")


class BatchDirectoryError(Exception):
    """The directory is not usable; the message is one line for the user."""


class BatchDirectory:
    """Only one router uses it at a time; the system releases the lock when the router exits, for
    whatever reason."""

    def __init__(self, root: Path, on_error: Callable[[], None] = lambda: None) -> None:
        """``on_error`` is called for each failure of the disk. Raises `BatchDirectoryError`."""
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (root / "files").mkdir(mode=0o700, exist_ok=True)
            self._lock = try_lock(root / "lock")
            if self._lock is None:
                raise BatchDirectoryError(f"another router uses {root}")
            self.database = root / "batches.db"
            self._store = BatchStore(self.database)
            self._root = root
            self._sweep()
        except (OSError, sqlite3.Error, StorageFailed) as error:
            raise BatchDirectoryError(f"cannot use {root}: {error}") from None
        self._on_error, self._warnings = on_error, RateLimitedLogger(logger, _LOG_INTERVAL_S)
        self._thread = ThreadPoolExecutor(1, "batches")
        self._readers = ThreadPoolExecutor(_READERS, "batch-files")
        self._results: deque[Result] = deque()
        """Results of lines that are not in the store yet."""

    async def run(self, work: Callable[[BatchStore], _Result]) -> _Result:
        """Return the result of ``work`` on the store, run on the single writer thread. It runs even
        if the caller is cancelled. Raises `StorageFailed`."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)
        try:
            return await asyncio.shield(running)
        except StorageFailed as error:
            self._note(error)
            raise

    async def read(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work``, which reads or writes files, run on another thread. Raises
        `StorageFailed`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)
        except (OSError, sqlite3.Error) as error:
            self._note(error)
            raise storage_failed(error) from None

    async def add_result(self, result: Result) -> None:
        """Return once ``result`` is on disk, however long that fails. Results that wait for the
        writer thread at the same time are one transaction."""
        self._results.append(result)
        while True:
            try:
                return await self.run(self._add_results)
            except StorageFailed:
                await asyncio.sleep(AGAIN_S)

    def _add_results(self, store: BatchStore) -> None:
        results = [self._results.popleft() for _ in range(len(self._results))]
        try:
            store.add_results(results)
        except StorageFailed:
            self._results.extend(results)
            raise

    def _note(self, error: Exception) -> None:
        self._on_error()
        self._warnings.warning("--batch-dir: %s", error)

    def close(self) -> None:
        self._readers.shutdown()
        self._thread.shutdown()
        self._store.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- files -----------------------------------------------------------------

    @staticmethod
    def new_id() -> str:
        return f"file-{uuid.uuid4().hex}"

    def path(self, file_id: str) -> Path:
        """Return the path of a file. ``file_id`` comes from the store, never from a client."""
        return self._root / "files" / file_id

    def create(self, file_id: str) -> BinaryIO:
        """Open a new file for writing. The store gets it once it is complete. Raises OSError."""
        descriptor = os.open(self.path(file_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return os.fdopen(descriptor, "wb")

    def finish(self, file: BinaryIO) -> None:
        """Close a file that is complete, once it is on disk. Raises OSError."""
        with file:
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self._root / "files", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, file_id: str) -> None:
        """Delete a file, complete or not."""
        try:
            self.path(file_id).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot delete %s: %s", self.path(file_id), error)

    def discard(self, *file_ids: str) -> asyncio.Future[None]:
        """Remove files that the store does not have. A cancelled change is still made, before
        this runs, and may have added them. This also runs if nobody waits for it."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self._discard, file_ids)

    def _discard(self, file_ids: Sequence[str]) -> None:
        try:
            unknown = [each for each in file_ids if not self._store.has_file(each)]
        except StorageFailed:  # the next start removes them
            return
        for file_id in unknown:
            self.remove(file_id)

    def _sweep(self) -> None:
        """Delete files that the store does not know, because their writer was killed."""
        known = self._store.file_ids()
        for path in (self._root / "files").iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)
