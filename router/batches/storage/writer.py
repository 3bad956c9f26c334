"""Writes the results of lines of all batches: all waiting results in one transaction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from router.batches.storage.directory import BatchDirectory
from router.batches.storage.store import Result, StoreFailed
from router.waiting import wait_at_most
from shared.logs import RateLimitedLogger

logger = logging.getLogger(__name__)
_AGAIN_S = 2.0


class ResultWriter:
    """While the disk accepts no writes, lines keep their slots: no other line runs whose result
    could not be stored."""

    def __init__(
        self, directory: BatchDirectory, stopping: asyncio.Event, on_error: Callable[[], None]
    ) -> None:
        self._directory, self._stopping, self._on_error = directory, stopping, on_error
        self._waiting: list[tuple[Result, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None
        self._log = RateLimitedLogger(logger)

    async def write(self, result: Result) -> bool:
        """Return once ``result`` is on disk; False if the router exits first."""
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, written))
        if self._task is None:
            self._task = asyncio.create_task(self._write_all())
        return await written

    async def _write_all(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting, []
            is_written = await self._try([result for result, _ in some])
            for _, written in some:
                if not written.done():  # the line may have been cancelled
                    written.set_result(is_written)
        self._task = None

    async def _try(self, results: list[Result]) -> bool:
        while True:
            try:
                await self._directory.run(lambda store: store.add_results(results))
                return True
            except StoreFailed as error:
                self._on_error()
                self._log.warning("cannot write results of batches: %s", error)
            except Exception:  # such as out of memory; all lines would wait for this task
                self._on_error()
                logger.exception("cannot write results of batches")
            if self._stopping.is_set():
                return False
            await wait_at_most(self._stopping, _AGAIN_S)
