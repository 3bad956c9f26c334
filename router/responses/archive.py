"""Stored responses on disk, which survive a restart: one SQLite file, written in the background.

Only one router uses a directory at a time. A power failure loses what the disk had not written yet,
as SQLite documents for ``synchronous = NORMAL`` with a write-ahead log.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from shared.locks import try_lock
from shared.watched_file import OpenedFile

logger = logging.getLogger(__name__)

_AGAIN_S = 5.0
_TABLE = """
CREATE TABLE IF NOT EXISTS turns (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, response_id TEXT, previous INTEGER,
    input_items BLOB NOT NULL, response BLOB NOT NULL
)
"""


_INSERT = "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?)"
_STATEMENTS = {
    "forget id": "UPDATE turns SET response_id = NULL WHERE number = ?",
    "remove": "DELETE FROM turns WHERE number = ?",
}


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


_Change = ArchivedTurn | Literal["forget id", "remove"]


class ResponseArchive:
    """The turns of a `ResponseStore`, by number. A thread writes the changes, and tries again where
    that fails. What waits is in the store's memory anyway, or as small as a number."""

    def __init__(self, directory: Path) -> None:
        """Raises `ArchiveError`."""
        self._directory = directory
        self._file: OpenedFile | None = None
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise ArchiveError(f"{directory} cannot be used: {error}") from None
        self._changes: dict[int, _Change] = {}
        """What is not written yet, by number: the last change of each turn."""
        self._changed = threading.Condition()
        """Guards the changes."""
        self._closing = False
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
        self._add(turn.number, turn)

    def forget_id(self, number: int) -> None:
        """Keep a turn only for later turns that build on it."""
        with self._changed:
            change = self._changes.get(number)
            if isinstance(change, ArchivedTurn):
                self._add(number, change._replace(response_id=None))
            elif change is None:
                self._add(number, "forget id")

    def remove(self, number: int) -> None:
        self._add(number, "remove")

    def _add(self, number: int, change: _Change) -> None:
        with self._changed:
            self._changes[number] = change
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write all changes, as far as possible within ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._changes or self._closing)
                closing, changes = self._closing, list(self._changes.items())
            failed = False
            for number, change in changes:
                # A full disk has room for removals, and a response that a client has deleted must
                # not reappear after a restart.
                if failed and isinstance(change, ArchivedTurn):
                    continue
                if not self._write(number, change):
                    failed = True
                    continue
                with self._changed:
                    if self._changes[number] is change:
                        del self._changes[number]
            if closing:
                break
            if failed:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _AGAIN_S)
        self._database.close()

    def _write(self, number: int, change: _Change) -> bool:
        """Return whether the change was written."""
        try:
            if self._file is None or not self._file.is_there:
                self._begin_again()
            with self._database:
                if isinstance(change, ArchivedTurn):
                    self._database.execute(_INSERT, change)
                else:
                    self._database.execute(_STATEMENTS[change], (number,))
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
