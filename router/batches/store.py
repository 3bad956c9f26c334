"""The state that survives the router: files, batches and results of lines, in one SQLite file.

All methods are called on one thread, so there is a single writer; each change is one transaction,
which is on disk when the method returns (a write-ahead log with ``synchronous = FULL``).
"""

from __future__ import annotations

import sqlite3
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from router.errors import NotFound, Unavailable
from shared.watched_file import OpenedFile


class BatchState(StrEnum):
    """The states of a batch (OpenAI, "Batch API", batch statuses)."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        return not FOLLOWERS[self]

    @property
    def time_field(self) -> str:
        """The column with the time at which a batch entered this state."""
        return f"{self.value}_at"


_S = BatchState
FOLLOWERS: dict[BatchState, frozenset[BatchState]] = {
    _S.VALIDATING: frozenset({_S.FAILED, _S.IN_PROGRESS, _S.CANCELLING, _S.FINALIZING}),
    _S.IN_PROGRESS: frozenset({_S.FINALIZING, _S.CANCELLING}),
    _S.FINALIZING: frozenset({_S.COMPLETED, _S.EXPIRED, _S.FAILED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.FAILED: frozenset(),
    _S.COMPLETED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""A batch that expires, or whose input is lost, is finalized too: what it has goes into its
files."""
CANCELLABLE = (_S.VALIDATING, _S.IN_PROGRESS)

_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_key ON files (key, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL,
    endpoint TEXT NOT NULL, model TEXT, input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL, metadata TEXT, file_expiry_s INTEGER,
    state TEXT NOT NULL, outcome TEXT, errors TEXT,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
    expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, result_bytes INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0, reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT, error_file_id TEXT
);
CREATE INDEX IF NOT EXISTS batches_by_key ON batches (key, number);
CREATE TABLE IF NOT EXISTS results (
    batch INTEGER NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (batch, line)
);
"""
_VACUUM_PAGES = 20_000
"""Pages returned to the file system at a time: some 80 MB."""
MAX_BATCHES = 10_000
"""Max batches per key that are kept; nothing else limits their disk space."""
RESULT_FILES = 2
"""Max files that a batch writes: answers and errors."""
_ENDED = ", ".join(f"'{state}'" for state in BatchState if state.has_ended)
_UNFINISHED_INDEX = (
    "CREATE INDEX IF NOT EXISTS unfinished_batches ON batches (input_file_id)"
    f" WHERE state NOT IN ({_ENDED})"
)
"""These are counted at the end of each line, and there may be many finished ones."""

Row = dict[str, Any]
"""A row of a table, by column."""


class StorageFailed(Unavailable, code="storage_failed"):
    """The server's disk is full or fails; nothing was changed."""


class FileNotFound(NotFound, code="file_not_found"):
    """The file does not exist or belongs to another key."""


class BatchNotFound(NotFound, code="batch_not_found"):
    """The batch does not exist or belongs to another key."""


def storage_failed(error: Exception | str) -> StorageFailed:
    """Return the error for a client, which is not told the paths in ``error``."""
    reason = error.strerror if isinstance(error, OSError) else error
    return StorageFailed(f"The server cannot write to its disk: {reason}", retry_after_s=30)


class NewFile(NamedTuple):
    id: str
    key: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int


class Result(NamedTuple):
    """The result of one line."""

    batch: int
    line: int
    ok: bool
    record: bytes
    """A line of the output file or the error file."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class BatchStore:
    def __init__(self, path: Path) -> None:
        """Raises sqlite3.Error and OSError."""
        self._file = OpenedFile(path)
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.row_factory = sqlite3.Row
        self._database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before there is any table
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("PRAGMA secure_delete = ON")
        self._database.executescript(_TABLES)
        self._database.execute(_UNFINISHED_INDEX)

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Make all changes of the block or none. Raises `StorageFailed`."""
        database = self._database
        if not self._file.is_there:  # the changes would be lost at the next start
            raise storage_failed("its directory was removed; restart the router")
        try:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OSError) as error:
            raise storage_failed(error) from None

    def _rows(self, query: str, *values: object) -> list[Row]:
        try:
            return [dict(row) for row in self._database.execute(query, values)]
        except sqlite3.Error as error:
            raise storage_failed(error) from None

    def _row(self, query: str, *values: object) -> Row | None:
        found = self._rows(query, *values)
        return found[0] if found else None

    # -- files -----------------------------------------------------------------

    def add_file(self, file: NewFile) -> Row:
        with self._change() as database:
            _insert_file(database, file)
        return self.find_file(file.key, file.id)

    def find_file(self, key: str, file_id: str, param: str = "file_id") -> Row:
        """Raises `FileNotFound`, which names ``param``."""
        found = self._row("SELECT * FROM files WHERE key = ? AND id = ?", key, file_id)
        if found is None:
            raise FileNotFound(f"There is no file '{file_id[:64]}'.", param=param)
        return found

    def page(
        self,
        table: str,
        key: str,
        limit: int,
        *,
        after: str | None = None,
        newest_first: bool = True,
        purpose: str | None = None,
    ) -> tuple[list[Row], bool]:
        """Return up to ``limit`` rows of "files" or "batches" of ``key`` that follow the id
        ``after``, and whether there are more. Raises `FileNotFound` and `BatchNotFound`."""
        direction, follows = ("DESC", "<") if newest_first else ("ASC", ">")
        where, values = "key = ?", [key]
        if purpose is not None:
            where, values = where + " AND purpose = ?", [*values, purpose]
        if after is not None:
            find = self.find_file if table == "files" else self.find_batch
            start = find(key, after)
            where, values = f"{where} AND number {follows} ?", [*values, start["number"]]
        query = f"SELECT * FROM {table} WHERE {where} ORDER BY number {direction} LIMIT ?"
        found = self._rows(query, *values, limit + 1)
        return found[:limit], len(found) > limit

    def use_of(self, key: str) -> tuple[int, int]:
        """Return the number of files of ``key``, including those that its unfinished batches will
        write, and the total bytes of its files and results."""
        files = self._rows("SELECT count(*) n, total(bytes) b FROM files WHERE key = ?", key)[0]
        results = self._rows("SELECT total(result_bytes) b FROM batches WHERE key = ?", key)[0]
        query = f"SELECT count(*) n FROM batches WHERE key = ? AND state NOT IN ({_ENDED})"
        unfinished = self._rows(query, key)[0]["n"]
        return files["n"] + RESULT_FILES * unfinished, int(files["b"] + results["b"])

    def user_of(self, file_id: str) -> str | None:
        """Return the id of an unfinished batch that reads a file, if there is one."""
        query = f"SELECT id FROM batches WHERE input_file_id = ? AND state NOT IN ({_ENDED})"
        found = self._row(query, file_id)
        return None if found is None else str(found["id"])

    def delete_file(self, key: str, file_id: str) -> None:
        with self._change() as database:
            database.execute("DELETE FROM files WHERE key = ? AND id = ?", (key, file_id))

    def has_file(self, file_id: str) -> bool:
        return self._row("SELECT 1 FROM files WHERE id = ?", file_id) is not None

    def file_ids(self) -> set[str]:
        return {row["id"] for row in self._rows("SELECT id FROM files")}

    def remove_old(self, now: int, keep_s: int) -> list[str]:
        """Remove files that expired and batches that ended ``keep_s`` ago. Return the files'
        ids."""
        used = f"SELECT input_file_id FROM batches WHERE state NOT IN ({_ENDED})"
        query = f"SELECT id FROM files WHERE expires_at <= ? AND id NOT IN ({used})"
        ids = [row["id"] for row in self._rows(query, now)]
        self._rows(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
        with self._change() as database:
            database.executemany("DELETE FROM files WHERE id = ?", [(each,) for each in ids])
            database.execute(
                f"DELETE FROM batches WHERE state IN ({_ENDED}) AND coalesce(completed_at,"
                " failed_at, expired_at, cancelled_at, created_at) < ?",
                (now - keep_s,),
            )
        return ids

    # -- batches ---------------------------------------------------------------

    def add_batch(self, values: Row) -> Row:
        """Add a batch in the state validating. ``values``: the columns that do not change. If its
        key has more than `MAX_BATCHES`, the oldest finished ones are removed."""
        columns = {**values, "state": BatchState.VALIDATING.value}
        names, places = ", ".join(columns), ", ".join("?" * len(columns))
        with self._change() as database:
            database.execute(
                f"INSERT INTO batches ({names}) VALUES ({places})", tuple(columns.values())
            )
            database.execute(
                f"DELETE FROM batches WHERE key = ? AND state IN ({_ENDED}) AND number <= (SELECT"
                " number FROM batches WHERE key = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (values["key"], values["key"], MAX_BATCHES),
            )
        return self.find_batch(values["key"], values["id"])

    def find_batch(self, key: str, batch_id: str) -> Row:
        """Raises `BatchNotFound`."""
        found = self._row("SELECT * FROM batches WHERE key = ? AND id = ?", key, batch_id)
        if found is None:
            raise BatchNotFound(f"There is no batch '{batch_id[:64]}'.", param="batch_id")
        return found

    def batch(self, number: int) -> Row | None:
        return self._row("SELECT * FROM batches WHERE number = ?", number)

    def unfinished(self, key: str | None = None) -> list[Row]:
        where, values = (" AND key = ?", [key]) if key is not None else ("", [])
        query = f"SELECT * FROM batches WHERE state NOT IN ({_ENDED}){where} ORDER BY number"
        return self._rows(query, *values)

    def totals(self) -> tuple[int, int, int]:
        """Return the number of unfinished batches, of their lines, and of their finished lines."""
        query = (
            "SELECT count(*) n, total(total) lines, total(completed + failed) done FROM batches"
            f" WHERE state NOT IN ({_ENDED})"
        )
        (found,) = self._rows(query)
        return int(found["n"]), int(found["lines"]), int(found["done"])

    def advance(self, number: int, state: BatchState, **columns: object) -> bool:
        """Set the ``state`` of a batch; return False if its current state does not allow that."""
        with self._change() as database:
            return _advance(database, number, state, columns)

    # -- lines -----------------------------------------------------------------

    def add_results(self, results: Sequence[Result]) -> None:
        """Add results of lines, and count them. A line that already has a result is not changed,
        nor is a finished batch."""
        with self._change() as database:
            for one in results:
                query = (
                    "INSERT OR IGNORE INTO results SELECT ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM"
                    f" batches WHERE number = ? AND state NOT IN ({_ENDED}))"
                )
                if database.execute(query, (*one[:4], one.batch)).rowcount != 1:
                    continue
                database.execute(
                    "UPDATE batches SET completed = completed + ?, failed = failed + ?,"
                    " result_bytes = result_bytes + ?, input_tokens = input_tokens + ?,"
                    " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
                    " reasoning_tokens = reasoning_tokens + ? WHERE number = ?",
                    (one.ok, not one.ok, len(one.record), *one[4:], one.batch),
                )

    def lines_done(self, number: int) -> array[int]:
        """Return the lines of a batch that have a result, in order."""
        query = "SELECT line FROM results WHERE batch = ? ORDER BY line"
        return array("I", (row["line"] for row in self._rows(query, number)))

    def finish(self, number: int, state: BatchState, files: Iterable[tuple[str, NewFile]]) -> None:
        """End a batch with its files, given by their columns; its results are in these files."""
        with self._change() as database:
            columns: dict[str, object] = {"result_bytes": 0}
            for column, file in files:
                _insert_file(database, file)
                columns[column] = file.id
            _advance(database, number, state, columns)
            database.execute("DELETE FROM results WHERE batch = ?", (number,))


def read_results(path: Path, number: int, ok: bool) -> Iterator[bytes]:
    """Yield the records of a batch in the order of its lines. Safe on any thread, because it has
    its own connection. Raises sqlite3.Error."""
    database = sqlite3.connect(path)
    try:
        query = "SELECT record FROM results WHERE batch = ? AND ok = ? ORDER BY line"
        for row in database.execute(query, (number, ok)):
            yield row[0]
    finally:
        database.close()


def _insert_file(database: sqlite3.Connection, file: NewFile) -> None:
    query = (
        "INSERT INTO files (id, key, filename, purpose, bytes, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)"
    )
    database.execute(query, file)


def _advance(
    database: sqlite3.Connection, number: int, state: BatchState, columns: dict[str, object]
) -> bool:
    before = [each.value for each, after in FOLLOWERS.items() if state in after]
    if not before:
        return False
    columns = {"state": state.value, state.time_field: int(time.time()), **columns}
    names = ", ".join(f"{name} = ?" for name in columns)
    places = ", ".join("?" * len(before))
    query = f"UPDATE batches SET {names} WHERE number = ? AND state IN ({places})"
    values = (*columns.values(), number, *before)
    return database.execute(query, values).rowcount == 1
