"""Runs all batches: those left by an earlier router, and new ones."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from router.batches.jobs.context import BatchContext
from router.batches.jobs.job import BatchJob
from router.batches.storage.store import Row, StoreFailed
from router.waiting import wait_at_most

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 60.0
_AGAIN_S = 2.0
_STOP_WITHIN_S = 5.0


class BatchRunner:
    def __init__(self, context: BatchContext, ending: asyncio.Event) -> None:
        """``ending`` is set when the router starts to shut down."""
        self._context, self._ending = context, ending
        self._jobs: dict[int, tuple[BatchJob, asyncio.Task[None]]] = {}
        """By number of the batch."""

    async def run(self) -> None:
        """Run all unfinished batches, until the router exits."""
        context = self._context
        try:
            await self._resume()
            while not self._ending.is_set():
                await self._remove_old()
                await wait_at_most(self._ending, _HOUSEKEEPING_S)
        finally:
            context.stopping.set()
            jobs = list(self._jobs.values())
            for job, _ in jobs:
                job.end()
            if jobs:
                await asyncio.wait([task for _, task in jobs], timeout=_STOP_WITHIN_S)

    def begin(self, row: Row) -> None:
        """Run a batch, which is in the store."""
        number = row["number"]
        if number not in self._jobs and not self._context.stopping.is_set():
            job = BatchJob(self._context, row)
            task = asyncio.create_task(job.run())
            self._jobs[number] = job, task
            task.add_done_callback(partial(self._ended, number, row["id"]))

    def cancel(self, number: int) -> None:
        """Stop the running lines of a batch that is cancelled in the store."""
        if number in self._jobs:
            self._jobs[number][0].end()

    def _ended(self, number: int, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._jobs[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s is suspended until the next start", batch_id, exc_info=error)

    async def _resume(self) -> None:
        directory = self._context.directory
        while not self._ending.is_set():
            try:
                for row in await directory.run(lambda store: store.unfinished()):
                    self.begin(row)
                await self._context.refresh()
                return
            except StoreFailed as error:
                self._context.metrics.batch_store_errors.inc()
                logger.warning("batches are waiting for their disk: %s", error)
                await wait_at_most(self._ending, _AGAIN_S)

    async def _remove_old(self) -> None:
        context = self._context
        now, oldest = int(context.clock.now()), context.clock.oldest
        try:
            old = await context.directory.run(
                lambda store: store.remove_old(now, context.keep_s, oldest)
            )
            for file_id in old:
                await context.directory.read(partial(context.directory.remove, file_id))
        except StoreFailed as error:
            context.metrics.batch_store_errors.inc()
            logger.warning("cannot delete old files of batches: %s", error)
