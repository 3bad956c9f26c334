"""Stored responses on disk, which survive a restart: one SQLite file, written in the background.

Only one router uses a directory at a time. A power failure loses what the disk had not written yet,
as SQLite documents for ``synchronous = NORMAL`` with a write-ahead log.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shared.locks import try_lock
from shared.watched_file import OpenedFile

logger = logging.getLogger(__name__)

_MAX_QUEUED, _MAX_QUEUED_BYTES = 10_000, 64 * 2**20
_AGAIN_S = 5.0
_Change = tuple[str, tuple[object, ...]]
_TABLE = """
CREATE TABLE IF NOT EXISTS turns (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, response_id TEXT, previous INTEGER,
    input_items BLOB NOT NULL, response BLOB NOT NULL
)
"""


class ArchiveError(Exception):
    """The directory is not usable; the message is one line for the user."""


class ArchivedTurn(NamedTuple):
    """One turn of a conversation. ``response_id`` is None for a deleted turn that later turns build
    on."""

    number: int
    key: str
    response_id: str | None
    previous: int | None
    input_items: bytes
    response: bytes


class ResponseArchive:
    """The turns of a `ResponseStore`, by number. Changes are queued for a thread. If the disk falls
    too far behind, new turns are dropped and logged; removals never are."""

    def __init__(self, directory: Path) -> None:
        """Raises `ArchiveError`."""
        self._directory = directory
        self._file: OpenedFile | None = None
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise ArchiveError(f"{directory} cannot be used: {error}") from None
        self._changes: queue.Queue[_Change | None] = queue.Queue()
        self._queued_bytes, self._bytes_lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._write_all, name="archive", daemon=True)

    def _open(self) -> None:
        """Raises `ArchiveError`, OSError and sqlite3.Error."""
        directory = self._directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = try_lock(directory / "lock")
        if self._lock is None:
            raise ArchiveError(f"another router uses {directory}")
        path = directory / "responses.db"
        file = OpenedFile(path)
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("PRAGMA secure_delete = ON")
        self._database.execute(_TABLE)
        self._file = file  # last: if any of this fails, the next write tries again

    def load(self) -> Iterator[ArchivedTurn]:
        """Yield all turns, oldest first, and start accepting changes. Raises `ArchiveError`."""
        try:
            for row in self._database.execute("SELECT * FROM turns ORDER BY number"):
                yield ArchivedTurn(*row)
        except sqlite3.Error as error:
            raise ArchiveError(f"{self._directory} cannot be read: {error}") from None
        self._thread.start()

    def add(self, turn: ArchivedTurn) -> None:
        behind = self._changes.qsize() >= _MAX_QUEUED or self._queued_bytes >= _MAX_QUEUED_BYTES
        if behind:
            logger.error("stored response not written: the disk is too slow")
            return
        change = "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?)", turn
        self._count(_num_bytes(change))
        self._changes.put(change)

    def _count(self, more_bytes: int) -> None:
        with self._bytes_lock:
            self._queued_bytes += more_bytes

    def forget_id(self, number: int) -> None:
        """Keep a turn only for later turns that build on it."""
        self._changes.put(("UPDATE turns SET response_id = NULL WHERE number = ?", (number,)))

    def remove(self, number: int) -> None:
        self._changes.put(("DELETE FROM turns WHERE number = ?", (number,)))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the queued changes, as far as possible within ``timeout_s``."""
        self._changes.put(None)
        self._thread.join(timeout_s)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write_all(self) -> None:
        failed: dict[object, _Change] = {}
        """Removals that failed, by number. A response that a client has deleted must not
        reappear after a restart."""
        again_at = 0.0
        while True:
            if failed and time.monotonic() >= again_at:
                self._write_again(failed)
                again_at = time.monotonic() + _AGAIN_S
            try:
                wait_s = max(0.0, again_at - time.monotonic()) if failed else None
                change = self._changes.get(timeout=wait_s)
            except queue.Empty:
                continue
            if change is None:
                break
            self._count(-_num_bytes(change))
            number = change[1][0]
            failed.pop(number, None)  # a turn that is written again must no longer be removed
            if not self._write(change) and not change[0].startswith("INSERT"):
                if not failed:
                    again_at = time.monotonic() + _AGAIN_S
                failed[number] = change
        self._write_again(failed)
        self._database.close()

    def _write_again(self, failed: dict[object, _Change]) -> None:
        """Write changes until one fails again. Written ones are removed from ``failed``."""
        for number, change in list(failed.items()):
            if not self._write(change):
                return
            del failed[number]

    def _write(self, change: _Change) -> bool:
        try:
            if self._file is None or not self._file.is_there:
                self._begin_again()
            with self._database:
                self._database.execute(*change)
        except Exception as error:  # the disk is full or fails; the thread must continue
            logger.error("a stored response is not written: %s", error)
            return False
        return True

    def _begin_again(self) -> None:
        """Store what comes in a new file, because the old one was removed: what is written to it
        would be lost at the next start."""
        self._file = None  # until the new one is open: it may get the number of the old one
        self._database.close()
        self._unlock()
        self._open()
        logger.error(
            "%s was removed; responses stored before are lost at the next start, new ones are "
            "written again",
            self._directory,
        )


def _num_bytes(change: _Change) -> int:
    return sum(len(value) for value in change[1] if isinstance(value, bytes))
