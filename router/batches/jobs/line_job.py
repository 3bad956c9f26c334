"""One line of a batch: it waits for capacity, runs, and its result is written."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from router.batches.jobs.context import BatchContext
from router.batches.jobs.line_call import LineAnswer, TryAgain, call
from router.batches.jobs.lines import InputLine, InvalidLine, parse_line
from router.batches.jobs.records import answered, not_run
from router.batches.storage.store import Result
from router.errors import ClientDisconnected, InternalError, Unauthorized
from router.fleet.sequences.losses import MAX_GONE
from router.tokens.work_pool import INLINE_SIZE

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 30.0

LineSource = bytes | Callable[[], bytes]
"""A line, or a function that reads it on a thread once there is capacity."""


class LineJob:
    def __init__(
        self,
        context: BatchContext,
        batch: int,
        number: int,
        source: LineSource,
        path: str,
        key: str,
    ) -> None:
        self._context, self._batch, self._number = context, batch, number
        self._source, self._path, self._key = source, path, key
        self._has_place = False

    async def run(self, gone: asyncio.Event, *, is_full: bool) -> None:
        """Process the line to its end, unless ``gone`` is set before; then it has no result.
        ``is_full``: its key has no space for an answer."""
        context = self._context
        try:
            try:
                result = await self._result(gone, is_full=is_full)
            except InvalidLine as error:  # the file was damaged after its check
                result = not_run(self._batch, self._number, "", "invalid_line", str(error))
            if result is not None and await context.writer.write(result):
                await context.refresh()
        finally:
            self._give_back()

    async def _result(self, gone: asyncio.Event, *, is_full: bool) -> Result | None:
        if is_full:
            limit = self._context.settings.batch_max_mb
            message = f"The files of this API key exceed {limit} MB: delete some."
            custom_id = (await self._line()).custom_id
            self._count(507)
            return not_run(self._batch, self._number, custom_id, "storage_full", message)
        tries = losses = 0
        while await self._take_place(gone):
            try:
                return await self._run_once(gone)
            except ClientDisconnected:
                return None
            except (
                TryAgain
            ) as error:  # it holds the line's content, which is not kept while waiting
                after_s = error.after_s
                losses += error.has_lost_engine
                if losses >= MAX_GONE:  # the line may be the cause
                    return await self._record((await self._line()).custom_id, error.last_answer)
            self._give_back()  # a model that is unavailable must not take capacity from others
            tries += 1
            wait_s = min(max(after_s, 2.0 ** min(tries, 10) / 4), _LONGEST_WAIT_S)
            await _unless(gone, asyncio.sleep(wait_s))
        return None

    async def _run_once(self, gone: asyncio.Event) -> Result:
        line = await self._line()
        return await self._record(line.custom_id, await self._answer(line, gone))

    async def _record(self, custom_id: str, answer: LineAnswer) -> Result:
        self._count(answer.status)
        make = partial(answered, self._batch, self._number, custom_id)
        small = len(answer.body) <= INLINE_SIZE
        try:
            whole = partial(make, *answer)
            return whole() if small else await self._context.directory.read(whole)
        except msgspec.MsgspecError:  # a line without a result would run again and again
            logger.exception(
                "the response to a line of a batch is not JSON (%s)", answer.request_id
            )
            failure = InternalError()
            return make(failure.status, answer.request_id, failure.body())

    async def _line(self) -> InputLine:
        source = self._source
        if isinstance(source, bytes):
            with contextlib.suppress(InvalidLine):  # a thread has a stack for deeper nesting
                return parse_line(source)
            return await self._context.directory.read(partial(parse_line, source))
        return await self._context.directory.read(lambda: parse_line(source()))

    async def _answer(self, line: InputLine, gone: asyncio.Event) -> LineAnswer:
        context = self._context
        tenant = context.tenant_named(self._key)
        if tenant is None:
            error = Unauthorized("The API key of this batch is no longer valid.")
            return LineAnswer(error.status, "", error.body())
        return await call(
            context.endpoints[self._path],
            self._path,
            bytes(line.body),
            tenant.in_background(),
            gone,
            models_may_come=context.is_young,
        )

    async def _take_place(self, gone: asyncio.Event) -> bool:
        if not gone.is_set() and await _unless(gone, self._context.places.take(self._key)):
            self._has_place = True
            self._context.figures.running += 1
        return self._has_place

    def _give_back(self) -> None:
        if self._has_place:
            self._has_place = False
            self._context.figures.running -= 1
            self._context.places.give_back(self._key)

    def _count(self, status: int) -> None:
        self._context.metrics.batch_lines.labels(self._path, str(status)).inc()


async def _unless(gone: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work`` until ``gone`` is set; return whether it was completed."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(gone.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.done() and not working.cancelled()
    finally:
        working.cancel()
        waiting.cancel()
