"""One line of a batch: it waits for capacity, is processed by the same code as a request to its
endpoint, and its result is written."""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from starlette.types import Message, Scope

from router.batches.context import BatchContext
from router.batches.lines import InvalidLine, parse_line, read_line
from router.batches.records import answered, not_run
from router.batches.store import Result, Row
from router.errors import (
    ApiError,
    EngineLost,
    InternalError,
    InvalidValue,
    ModelNotFound,
    RequestCancelled,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from router.fleet.sequences.losses import MAX_GONE
from router.fleet.sequences.timeouts import LOST
from router.fleet.tenants.tenant import Tenant
from router.tokens.work_pool import INLINE_SIZE

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 30.0


class LineAnswer(NamedTuple):
    status: int
    request_id: str
    body: bytes
    """JSON."""


class _TryAgain(Exception):
    """There is no capacity or no engine for the line now."""

    def __init__(self, error: ApiError, request_id: str) -> None:
        super().__init__(error.message)
        self.request_id = request_id
        self.after_s = error.retry_after_s or 1.0
        self.has_lost_engine = error.code == LOST


class LineJob:
    """Processes the line that begins at ``start`` of the input of a batch. Cancelling its task ends
    it as if a client had closed its connection, and it has no result."""

    def __init__(self, context: BatchContext, batch: Row, number: int, start: int) -> None:
        self._context, self._batch, self._number = context, batch["number"], number
        self._path, self._key = batch["endpoint"], batch["key"]
        self._read = partial(read_line, context.directory.path(batch["input_file_id"]), start)
        self._custom_id = ""

    async def run(self, *, is_full: bool) -> None:
        """``is_full``: its key has no space for an answer. Raises `StorageFailed` if its content
        cannot be read."""
        context = self._context
        try:
            result = await (self._refused() if is_full else self._answered())
        except InvalidLine as error:  # the file was damaged after its check
            result = self._not_run("invalid_line", str(error))
        await context.directory.add_result(result)
        await context.refresh()

    async def _refused(self) -> Result:
        limit = self._context.settings.batch_max_mb
        await self._body()
        self._count(507)
        message = f"The files of this API key exceed {limit} MB: delete some."
        return self._not_run("storage_full", message)

    async def _answered(self) -> Result:
        places, figures = self._context.places, self._context.figures
        tries = losses = 0
        while True:
            await places.take(self._key)
            figures.running += 1
            try:
                return await self._record(await self._answer(await self._body()))
            except _TryAgain as error:
                after_s, request_id = error.after_s, error.request_id
                losses += error.has_lost_engine
            finally:  # also so that a model that is unavailable takes no capacity from others
                figures.running -= 1
                places.give_back(self._key)
            if losses >= MAX_GONE:  # the line may be the cause
                lost = EngineLost("The engines that ran this line were lost.")
                return await self._record(_failed(lost, request_id))
            tries += 1
            wait_s = min(max(after_s, 2.0 ** min(tries, 10) / 4), _LONGEST_WAIT_S)
            await asyncio.sleep(wait_s)

    async def _body(self) -> bytes:
        """Return the body of the request; it is not kept while the line waits."""
        line = await self._context.directory.read(lambda: parse_line(self._read()))
        self._custom_id = line.custom_id
        return bytes(line.body)

    async def _answer(self, body: bytes) -> LineAnswer:
        """Return the response to ``body``. Raises `_TryAgain`."""
        context, request_id = self._context, f"req_{uuid.uuid4().hex}"
        unread, parts = [body], list[bytes]()

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # this client stays until the line is cancelled
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            tenant = context.tenant_named(self._key)
            if tenant is None:
                raise Unauthorized("The API key of this batch is no longer valid.")
            may_stream = b'"stream"' in body or b"\\u" in body  # a key may be written with escapes
            if may_stream and await asyncio.to_thread(_streams, body):
                raise InvalidValue("'stream' must be false in a batch.", param="stream")
            scope = _scope(self._path, tenant.in_background(), request_id)
            await context.endpoints[self._path](scope, receive, send)
        except (EngineLost, RequestCancelled) as error:  # the line may have crashed two engines
            return _failed(error, request_id)
        except (TooManyRequests, Unavailable) as error:
            raise _TryAgain(error, request_id) from None
        except ApiError as error:
            if context.is_young and isinstance(error, ModelNotFound):
                raise _TryAgain(error, request_id) from None
            return _failed(error, request_id)
        except Exception:
            logger.exception("a line of a batch raised an exception (%s)", request_id)
            return _failed(InternalError(), request_id)
        join = partial(b"".join, parts)
        small = sum(map(len, parts)) <= INLINE_SIZE
        return LineAnswer(200, request_id, join() if small else await asyncio.to_thread(join))

    async def _record(self, answer: LineAnswer) -> Result:
        self._count(answer.status)
        make = partial(answered, self._batch, self._number, self._custom_id)
        try:
            if len(answer.body) <= INLINE_SIZE:
                return make(*answer)
            return await self._context.directory.read(partial(make, *answer))
        except msgspec.MsgspecError:  # a line without a result would run again and again
            logger.exception("a response to a line is not JSON (%s)", answer.request_id)
            return make(*_failed(InternalError(), answer.request_id))

    def _not_run(self, code: str, message: str) -> Result:
        return not_run(self._batch, self._number, self._custom_id, code, message)

    def _count(self, status: int) -> None:
        self._context.metrics.batch_lines.labels(self._path, str(status)).inc()


def _failed(error: ApiError, request_id: str) -> LineAnswer:
    return LineAnswer(error.status, request_id, error.body())


class _Body(Struct, frozen=True):
    stream: Any = None


def _streams(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Body).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False  # the endpoint refuses it


def _scope(path: str, tenant: Tenant, request_id: str) -> Scope:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": {
            "request_id": request_id,
            "path": path,
            "tenant": tenant,
            "api_key": tenant.name,
            "limits_left": {},
        },
    }
