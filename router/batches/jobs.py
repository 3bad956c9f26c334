"""Runs batches: their files are validated, their lines run, and their results become files."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from operator import methodcaller

import msgspec

from router.batches.context import BatchContext
from router.batches.directory import AGAIN_S
from router.batches.line_job import LineJob
from router.batches.lines import (
    FoundLine,
    InvalidLine,
    check_file,
    parse_line,
    unfinished_lines,
)
from router.batches.objects import BatchError, BatchErrors
from router.batches.records import not_run
from router.batches.store import (
    BatchState,
    NewFile,
    Result,
    Row,
    StorageFailed,
    read_results,
)
from router.waiting import wait_at_most

logger = logging.getLogger(__name__)

_AGAIN_AFTER_BUG_S = 30.0
_LOOK_S = 30.0
"""Interval for checking whether a batch has expired. The event loop's own clock, time.monotonic,
stands still while a machine sleeps."""
_HOUSEKEEPING_S = 60.0
_STOP_WITHIN_S = 5.0
_READ_LINES = 64
_WRITE_LINES = 500
_ENDS = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed because the batch was cancelled.",
}
_LOST = BatchError(code="input_file_lost", message="The input file no longer exists.")


class BatchRunner:
    """Runs all batches: those left by an earlier router, and new ones."""

    def __init__(self, context: BatchContext, ending: asyncio.Event) -> None:
        """``ending`` is set when the router starts to shut down."""
        self._context, self._ending = context, ending
        self._jobs: dict[int, tuple[BatchJob, asyncio.Task[None]]] = {}
        """By number of the batch."""

    async def run(self) -> None:
        """Run all unfinished batches, until the router exits."""
        context = self._context
        try:
            has_resumed = False
            while not self._ending.is_set():
                try:
                    if not has_resumed:
                        for row in await context.directory.run(lambda store: store.unfinished()):
                            self.begin(row)
                        has_resumed = True
                        await context.refresh()
                    await self._remove_old()
                except StorageFailed:
                    await wait_at_most(self._ending, AGAIN_S)
                else:
                    await wait_at_most(self._ending, _HOUSEKEEPING_S)
        finally:
            context.stopping.set()
            jobs = list(self._jobs.values())
            for job, _ in jobs:
                job.interrupt()
            if jobs:
                await asyncio.wait([task for _, task in jobs], timeout=_STOP_WITHIN_S)

    def begin(self, row: Row) -> None:
        """Run a batch, which is in the store."""
        number = row["number"]
        if number not in self._jobs and not self._context.stopping.is_set():
            job = BatchJob(self._context, row)
            task = asyncio.create_task(job.run())
            self._jobs[number] = job, task
            task.add_done_callback(lambda _: self._jobs.pop(number))

    def cancel(self, number: int) -> None:
        """Stop the running lines of a batch that is cancelled in the store."""
        if number in self._jobs:
            self._jobs[number][0].interrupt()

    async def _remove_old(self) -> None:
        directory, keep_s, now = self._context.directory, self._context.keep_s, int(time.time())
        for file_id in await directory.run(lambda store: store.remove_old(now, keep_s)):
            await directory.read(partial(directory.remove, file_id))


class BatchJob:
    """Processes a batch to its end. The job continues from whatever state the store has."""

    def __init__(self, context: BatchContext, row: Row) -> None:
        self._context, self._directory = context, context.directory
        self._row = row
        self._number, self._id = row["number"], row["id"]
        self._path = context.directory.path(row["input_file_id"])
        self._interrupted = threading.Event()
        self._lines: asyncio.Task[None] | None = None
        """Runs the lines."""

    def interrupt(self) -> None:
        """Stop validating or running lines: the batch was cancelled or the router exits."""
        self._interrupted.set()
        if self._lines is not None:
            self._lines.cancel()

    async def run(self) -> None:
        stopping = self._context.stopping
        while not stopping.is_set():
            try:
                row = await self._directory.run(lambda store: store.batch(self._number))
                if row is None or BatchState(row["state"]).has_ended:
                    return
                await self._step(row)
                await self._context.refresh()
            except* StorageFailed:
                await wait_at_most(stopping, AGAIN_S)
            except* Exception:  # an internal error: its batch can still be cancelled, and expires
                logger.exception("%s failed and is retried", self._id)
                await wait_at_most(stopping, _AGAIN_AFTER_BUG_S)

    async def _step(self, row: Row) -> None:
        is_lost = await self._directory.read(self._is_input_lost)
        is_expired = time.time() >= row["expires_at"]
        match BatchState(row["state"]):
            case BatchState.VALIDATING if is_lost:
                await self._advance(BatchState.FAILED, errors=_errors([_LOST]))
            case BatchState.VALIDATING | BatchState.IN_PROGRESS if is_expired:
                await self._advance(BatchState.FINALIZING, outcome=BatchState.EXPIRED.value)
            case BatchState.VALIDATING:
                await self._check()
            case BatchState.IN_PROGRESS:
                await self._run_lines(row, is_lost=is_lost)
            case BatchState.CANCELLING:
                await self._end_lines(row, "batch_cancelled")
                await self._write_files(row, BatchState.CANCELLED)
            case BatchState.FINALIZING:
                if row["outcome"] == BatchState.EXPIRED.value:
                    await self._end_lines(row, "batch_expired")
                await self._write_files(row, BatchState(row["outcome"]))

    def _is_input_lost(self) -> bool:
        """Return whether the input was removed. A disk that is away may come back."""
        return self._path.parent.is_dir() and not self._path.exists()

    async def _advance(self, state: BatchState, **columns: object) -> None:
        """Set the ``state`` of the batch, unless it was cancelled in the meantime."""
        await self._directory.run(lambda store: store.advance(self._number, state, **columns))
        logger.info("%s: %s", self._id, state.value)

    async def _check(self) -> None:
        limit, endpoint = self._context.max_body_bytes, self._row["endpoint"]
        async with self._context.checking:
            found = await self._directory.read(
                lambda: check_file(self._path, endpoint, limit, self._interrupted)
            )
        if found is None:
            return
        if found.errors:
            await self._advance(BatchState.FAILED, errors=_errors(found.errors), total=0)
        else:
            await self._advance(BatchState.IN_PROGRESS, total=found.total, model=found.model)

    # -- lines -----------------------------------------------------------------

    async def _run_lines(self, row: Row, *, is_lost: bool) -> None:
        """Run the lines that have no result, until the batch expires or is interrupted."""
        directory = self._directory
        done = await directory.run(lambda store: store.lines_done(self._number))
        if len(done) >= row["total"]:
            await self._advance(BatchState.FINALIZING, outcome=BatchState.COMPLETED.value)
            return
        lines = iter(()) if is_lost else unfinished_lines(self._path, done)
        if not (some := await directory.read(partial(_take, lines))):  # or the end of it is lost
            outcome = BatchState.FAILED.value
            await self._advance(BatchState.FINALIZING, outcome=outcome, errors=_errors([_LOST]))
            return
        if self._interrupted.is_set():
            return
        running = self._lines = asyncio.create_task(self._run_each(some, lines))
        while not running.done():
            if (left_s := row["expires_at"] - time.time()) <= 0:
                running.cancel()
            await asyncio.wait({running}, timeout=min(left_s, _LOOK_S) if left_s > 0 else None)
        if not running.cancelled():
            running.result()  # or its error; the next step checks which lines have a result

    async def _run_each(self, some: list[tuple[int, int]], lines: Iterator[FoundLine]) -> None:
        """Run ``some`` lines, given by number and start, and then ``lines``. Raises a group of
        `StorageFailed`."""
        context, key = self._context, self._row["key"]
        slots = asyncio.Semaphore(context.settings.max_batch_requests)
        async with asyncio.TaskGroup() as group:
            while some:
                _, used = await self._directory.run(lambda store: store.use_of(key))
                for number, start in some:
                    await slots.acquire()
                    job = LineJob(context, self._row, number, start)
                    task = group.create_task(job.run(is_full=used > context.max_bytes))
                    task.add_done_callback(lambda _: slots.release())
                some = await self._directory.read(partial(_take, lines))

    async def _end_lines(self, row: Row, code: str) -> None:
        """Set an error for each line without a result, as far as the input can be read."""
        if not row["total"]:  # its file was not checked to the end
            return
        directory = self._directory
        done = await directory.run(lambda store: store.lines_done(self._number))
        lines = unfinished_lines(self._path, done)
        async with self._context.checking:
            while True:
                try:
                    results = await directory.read(partial(_ended, self._number, lines, code))
                except StorageFailed as error:
                    logger.error("%s ends, but its input cannot be read: %s", self._id, error)
                    return
                if not results:
                    return
                await directory.run(methodcaller("add_results", results))

    # -- files -----------------------------------------------------------------

    async def _write_files(self, row: Row, state: BatchState) -> None:
        context, directory = self._context, self._directory
        expiry_s = min(row["file_expiry_s"] or context.keep_s, context.keep_s)
        made: list[tuple[str, NewFile]] = []
        await directory.read(partial(self._check_room, row["result_bytes"]))
        try:
            for name, ok in (("output", True), ("error", False)):
                now, filename = int(time.time()), f"{self._id}_{name}.jsonl"
                file_id, key, purpose = directory.new_id(), row["key"], "batch_output"
                new = NewFile(file_id, key, filename, purpose, 0, now, now + expiry_s)
                made.append((f"{name}_file_id", new))
                async with context.checking:
                    size = await directory.read(partial(self._write_file, file_id, ok))
                made[-1] = (f"{name}_file_id", new._replace(bytes=size))
            files = [each for each in made if each[1].bytes]
            await directory.run(lambda store: store.finish(self._number, state, files))
            logger.info("%s: %s", self._id, state.value)
        except BaseException:
            directory.discard(*(new.id for _, new in made))
            raise

    def _check_room(self, size_bytes: int) -> None:
        """Raise OSError if the disk has no room for files of this size: trying it would fill the
        disk again and again."""
        if shutil.disk_usage(self._path.parent).free < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write_file(self, file_id: str, ok: bool) -> int:
        """Write a file of results; return its size. An empty one is deleted."""
        directory, size = self._directory, 0
        with directory.create(file_id) as file:
            for record in read_results(directory.database, self._number, ok):
                size += file.write(record)
            directory.finish(file)
        if not size:
            directory.remove(file_id)
        return size


def _take(lines: Iterator[FoundLine]) -> list[tuple[int, int]]:
    """Return the numbers and starts of the next lines, none at the end."""
    return [(line.number, line.start) for line in islice(lines, _READ_LINES)]


def _ended(batch: int, lines: Iterator[FoundLine], code: str) -> list[Result]:
    """Return the results of the next lines, which do not run."""
    some = islice(lines, _WRITE_LINES)
    return [not_run(batch, each.number, _custom_id(each.raw), code, _ENDS[code]) for each in some]


def _custom_id(raw: bytes | None) -> str:
    try:
        return parse_line(raw or b"").custom_id
    except InvalidLine:  # the file was damaged after its check
        return ""


def _errors(errors: list[BatchError]) -> str:
    return msgspec.json.encode(BatchErrors(data=errors)).decode()
