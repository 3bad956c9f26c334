"""The directory of ``--batch-dir``: its lock, its database, its files, and the writer thread.

File names are ids generated here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from router.batches.storage.store import BatchStore, StoreFailed
from shared.locks import try_lock

logger = logging.getLogger(__name__)

_READERS = 4
_Result = TypeVar("_Result")


class BatchDirectoryError(Exception):
    """The directory is not usable; the message is one line for the user."""


class BatchDirectory:
    """Only one router uses it at a time; the system releases the lock when the router exits, for
    whatever reason."""

    def __init__(self, root: Path) -> None:
        """Raises `BatchDirectoryError`."""
        try:
            for path in (root, root / "files", root / "new"):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = try_lock(root / "lock")
            if self._lock is None:
                raise BatchDirectoryError(f"another router uses {root}")
            self.database = root / "batches.db"
            self._store = BatchStore(self.database)
            self._root = root
            self._sweep()
        except (OSError, sqlite3.Error, StoreFailed) as error:
            raise BatchDirectoryError(f"cannot use {root}: {error}") from None
        self._thread = ThreadPoolExecutor(1, "batches")
        self._readers = ThreadPoolExecutor(_READERS, "batch-files")

    async def run(self, work: Callable[[BatchStore], _Result]) -> _Result:
        """Return the result of ``work`` on the store, run on the single writer thread. It runs even
        if the caller is cancelled. Raises `StoreFailed`."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)
        return await asyncio.shield(running)

    async def read(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work`` on files, run on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

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

    def new_path(self, file_id: str) -> Path:
        """Return the path of a file while it is being written."""
        return self._root / "new" / file_id

    def publish(self, file_id: str) -> None:
        """Move a file that is complete and on disk to its place. Raises OSError."""
        self.new_path(file_id).rename(self.path(file_id))
        folder = os.open(self._root / "files", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, file_id: str) -> None:
        """Delete a file, complete or not."""
        for path in (self.path(file_id), self.new_path(file_id)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot delete %s: %s", path, error)

    def discard(self, *file_ids: str) -> asyncio.Future[None]:
        """Remove files that the store does not have. A cancelled change is still made, before
        this runs, and may have added them. This also runs if nobody waits for it."""
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._thread, self._discard, file_ids)
        except RuntimeError:  # closed: the next start removes them
            ended = loop.create_future()
            ended.set_result(None)
            return ended

    def _discard(self, file_ids: Sequence[str]) -> None:
        try:
            unknown = [each for each in file_ids if not self._store.has_file(each)]
        except StoreFailed:  # the next start removes them
            return
        for file_id in unknown:
            self.remove(file_id)

    def _sweep(self) -> None:
        """Delete files that the store does not know, because their writer was killed."""
        known = self._store.file_ids()
        for folder in ("files", "new"):
            for path in (self._root / folder).iterdir():
                if folder == "new" or path.name not in known:
                    path.unlink(missing_ok=True)
