"""The job of one batch: its file is validated, its lines run, and their results become files."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller

import msgspec

from router.batches.jobs.context import BatchContext
from router.batches.jobs.line_job import LineJob, LineSource
from router.batches.jobs.lines import (
    InvalidLine,
    check_file,
    parse_line,
    read_line,
    read_lines,
)
from router.batches.jobs.records import not_run
from router.batches.objects import BatchError, BatchErrors
from router.batches.storage.states import BatchState
from router.batches.storage.store import NewFile, Result, Row, StoreFailed, read_results
from router.tokens.work_pool import INLINE_SIZE
from router.waiting import wait_at_most

logger = logging.getLogger(__name__)

_AGAIN_S = 2.0
_AGAIN_AFTER_BUG_S = 30.0
_UNREADABLE_AFTER = 10
"""Number of attempts to read the input of a batch that ends, before it ends without the errors of
its remaining lines."""
_LOOK_S = 30.0
"""Interval for checking whether a batch has expired. The event loop's own clock, time.monotonic,
stands still while a machine sleeps."""
_READ_LINES = 64
_READ_BYTES = 1_000_000
_WRITE_LINES = 500
_ENDS = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
}
_LOST = msgspec.json.encode(
    BatchErrors(
        data=[BatchError(code="input_file_lost", message="The input file no longer exists.")]
    )
).decode()
Lines = list[tuple[int, int, bytes]]
"""The number of each line, its offset in the file, and its content."""


class BatchJob:
    """Processes a batch to its end. The job continues from whatever state the store has."""

    def __init__(self, context: BatchContext, row: Row) -> None:
        self._context = context
        self._number: int = row["number"]
        self._id: str = row["id"]
        self._key: str = row["key"]
        self._endpoint: str = row["endpoint"]
        self._path = context.directory.path(row["input_file_id"])
        self._max_body_bytes = context.max_body_bytes
        self._unreadable = 0  # failed attempts to read the input of a batch that ends
        self._ending = asyncio.Event()
        self._stop_reading = threading.Event()

    def end(self) -> None:
        """Stop processing, because the batch was cancelled or the router exits."""
        self._ending.set()
        self._stop_reading.set()

    async def run(self) -> None:
        context = self._context
        while not context.stopping.is_set():
            try:
                row = await context.directory.run(lambda store: store.batch(self._number))
                if row is None or BatchState(row["state"]).has_ended:
                    break
                await self._step(row)
            except (StoreFailed, OSError, sqlite3.Error) as error:
                context.metrics.batch_store_errors.inc()
                logger.warning("%s is waiting for its disk: %s", self._id, error)
                await wait_at_most(context.stopping, _AGAIN_S)
            except Exception:  # an internal error: its batch can still be cancelled, and expires
                logger.exception("%s failed and is retried", self._id)
                await wait_at_most(context.stopping, _AGAIN_AFTER_BUG_S)
            await context.refresh()

    async def _step(self, row: Row) -> None:
        is_lost = await self._context.directory.read(self._is_input_lost)
        knows_lines = row["total"] and not is_lost  # its file was checked to the end, and is there
        match BatchState(row["state"]):
            case BatchState.VALIDATING if is_lost:
                await self._advance(BatchState.FAILED, errors=_LOST)
            case BatchState.VALIDATING if self._left_s(row) <= 0:
                await self._expire()
            case BatchState.VALIDATING:
                await self._check()
            case BatchState.IN_PROGRESS if is_lost:
                await self._fail()
            case BatchState.IN_PROGRESS:
                await self._run_lines(row)
            case BatchState.CANCELLING:
                if knows_lines:
                    await self._end_lines("batch_cancelled")
                await self._write_files(row, BatchState.CANCELLED)
            case BatchState.FINALIZING:
                if knows_lines and row["outcome"] == BatchState.EXPIRED.value:
                    await self._end_lines("batch_expired")
                await self._write_files(row, BatchState(row["outcome"]))

    def _is_input_lost(self) -> bool:
        """Return whether the input was removed. A disk that is away may come back."""
        return self._path.parent.is_dir() and not self._path.exists()

    def _left_s(self, row: Row) -> float:
        return self._context.clock.left_s(row["expires_at"])

    async def _expire(self) -> None:
        await self._advance(BatchState.FINALIZING, outcome=BatchState.EXPIRED.value)

    async def _fail(self) -> None:
        """End the batch because its input, or the end of it, no longer exists."""
        outcome = BatchState.FAILED.value
        await self._advance(BatchState.FINALIZING, outcome=outcome, errors=_LOST)

    async def _advance(self, state: BatchState, **columns: object) -> None:
        """Set the ``state`` of the batch, unless it was cancelled in the meantime."""
        await self._context.directory.run(
            lambda store: store.advance(self._number, state, **columns)
        )
        logger.info("%s: %s", self._id, state.value)

    async def _check(self) -> None:
        work = partial(
            check_file, self._path, self._endpoint, self._max_body_bytes, self._stop_reading
        )
        async with self._context.checking:
            found = await self._context.directory.read(work)
        if found is None:
            return
        if found.errors:
            errors = msgspec.json.encode(BatchErrors(data=found.errors)).decode()
            await self._advance(BatchState.FAILED, errors=errors, total=0)
        else:
            await self._advance(BatchState.IN_PROGRESS, total=found.total, model=found.model)

    # -- lines -----------------------------------------------------------------

    async def _run_lines(self, row: Row) -> None:
        done = await self._context.directory.run(lambda store: store.lines_done(self._number))
        if len(done) >= row["total"]:
            await self._advance(BatchState.FINALIZING, outcome=BatchState.COMPLETED.value)
            return
        gone = asyncio.Event()
        feeding = asyncio.create_task(self._feed(done, gone))
        ending = asyncio.create_task(self._ending.wait())
        first = asyncio.FIRST_COMPLETED
        try:
            while (left_s := self._left_s(row)) > 0:
                wait_s = min(left_s, _LOOK_S)
                if (await asyncio.wait({feeding, ending}, timeout=wait_s, return_when=first))[0]:
                    break
        finally:
            ending.cancel()
            has_fed = feeding.done()
            gone.set()
            num_fed = await feeding  # or its error; the next step checks which lines have ended
        if self._ending.is_set():
            return
        if not has_fed:
            await self._expire()
        elif not num_fed:
            await self._fail()

    async def _feed(self, done: array[int], gone: asyncio.Event) -> int:
        """Run each line that is not ``done``. Return their number when all started lines have
        ended, which is soon once ``gone`` is set."""
        context = self._context
        lines = self._unfinished(done)
        num_fed = 0
        slots = asyncio.Semaphore(context.settings.max_batch_requests)
        running: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            slots.release()
            if not task.cancelled() and (error := task.exception()) is not None:
                failures.append(error)

        try:
            while not gone.is_set() and not failures:
                some = self._sources(await context.directory.read(partial(_take, lines)))
                if not some:
                    break
                _, used = await context.directory.run(lambda store: store.use_of(self._key))
                for number, source in some:
                    await slots.acquire()
                    if gone.is_set():
                        return num_fed
                    num_fed += 1
                    line = LineJob(context, self._number, number, source, self._endpoint, self._key)
                    is_full = used > context.max_bytes
                    task = asyncio.create_task(line.run(gone, is_full=is_full))
                    running.add(task)
                    task.add_done_callback(ended)
        finally:
            while running:
                await asyncio.wait(running)
            if failures:  # otherwise the next step would run these lines again at once
                raise failures[0]
        return num_fed

    def _sources(self, lines: Lines) -> list[tuple[int, LineSource]]:
        """Return how each of ``lines`` gets its content. A large line is read again later, because
        many batches may have waiting lines."""
        return [
            (
                number,
                raw if len(raw) <= INLINE_SIZE else partial(read_line, self._path, start),
            )
            for number, start, raw in lines
        ]

    async def _end_lines(self, code: str) -> None:
        """Set an error for each line without a result, as far as the input can be read."""
        directory = self._context.directory
        done = await directory.run(lambda store: store.lines_done(self._number))
        lines = self._unfinished(done)
        async with self._context.checking:
            while some := await self._read_input(partial(_take, lines, _WRITE_LINES)):
                results = await directory.read(partial(_ended, self._number, some, code))
                await directory.run(methodcaller("add_results", results))

    async def _read_input(self, take: Callable[[], Lines]) -> Lines:
        """Return some lines; none if the input could not be read too often."""
        try:
            return await self._context.directory.read(take)
        except OSError as error:
            self._unreadable += 1
            if self._unreadable < _UNREADABLE_AFTER:
                raise
            logger.error("%s ends, but its input cannot be read: %s", self._id, error)
            return []

    def _unfinished(self, done: Sequence[int]) -> Iterator[tuple[int, int, bytes]]:
        """Yield the lines except those numbered in ``done``, which is sorted. Lines that are longer
        than the limit, which may have been larger when the file was checked, are refused when they
        run."""
        size = self._path.stat().st_size
        place = 0
        for number, start, raw in read_lines(self._path, size):
            if place < len(done) and done[place] == number:
                place += 1
            elif raw:  # a file that was checked has few blank lines
                yield number, start, raw

    # -- files -----------------------------------------------------------------

    async def _write_files(self, row: Row, state: BatchState) -> None:
        context = self._context
        files = [("output_file_id", True, "output"), ("error_file_id", False, "error")]
        made: list[tuple[str, NewFile]] = []
        await context.directory.read(partial(self._check_room, row["result_bytes"]))
        try:
            for column, ok, name in files:
                file_id = context.directory.new_id()
                expiry_s = min(row["file_expiry_s"] or context.keep_s, context.keep_s)
                now, filename = int(time.time()), f"{self._id}_{name}.jsonl"
                new = NewFile(file_id, self._key, filename, "batch_output", 0, now, now + expiry_s)
                made.append((column, new))
                async with context.checking:
                    size = await context.directory.read(partial(self._write_file, file_id, ok))
                made.pop()
                if size:
                    made.append((column, new._replace(bytes=size)))
            await context.directory.run(lambda store: store.finish(self._number, state, made))
            logger.info("%s: %s", self._id, state.value)
        except BaseException:
            context.directory.discard(*(new.id for _, new in made))
            raise

    def _check_room(self, size_bytes: int) -> None:
        """Raise OSError if the disk has no room for files of this size: trying it would fill the
        disk again and again."""
        if shutil.disk_usage(self._path.parent).free < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write_file(self, file_id: str, ok: bool) -> int:
        """Write a file of results; return its size. An empty one is deleted."""
        directory, size = self._context.directory, 0
        with open(
            os.open(directory.new_path(file_id), os.O_WRONLY | os.O_CREAT, 0o600), "wb"
        ) as file:
            for record in read_results(directory.database, self._number, ok):
                size += file.write(record)
            file.flush()
            os.fsync(file.fileno())
        if size:
            directory.publish(file_id)
        else:
            directory.remove(file_id)
        return size


def _take(lines: Iterator[tuple[int, int, bytes]], most: int = _READ_LINES) -> Lines:
    """Return the next lines, none at the end."""
    found: Lines = []
    size = 0
    for line in lines:
        found.append(line)
        size += len(line[2])
        if len(found) >= most or size >= _READ_BYTES:
            break
    return found


def _ended(batch: int, lines: Lines, code: str) -> list[Result]:
    return [not_run(batch, number, _custom_id(raw), code, _ENDS[code]) for number, _, raw in lines]


def _custom_id(raw: bytes) -> str:
    try:
        return parse_line(raw).custom_id
    except InvalidLine:  # the file was damaged after its check
        return ""
