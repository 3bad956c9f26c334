"""One line of a batch, processed by the same code as a request to its endpoint."""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp, Message, Scope

from router.errors import (
    ApiError,
    ClientDisconnected,
    EngineLost,
    InternalError,
    InvalidValue,
    ModelNotFound,
    RequestCancelled,
    TooManyRequests,
    Unavailable,
)
from router.fleet.sequences.timeouts import LOST
from router.fleet.tenants.tenant import Tenant
from router.tokens.work_pool import INLINE_SIZE

logger = logging.getLogger(__name__)


class LineAnswer(NamedTuple):
    status: int
    request_id: str
    body: bytes
    """JSON."""


class TryAgain(Exception):
    """There is no capacity or no engine for the line now."""

    def __init__(self, error: ApiError, request_id: str) -> None:
        super().__init__(error.message)
        self.after_s = error.retry_after_s or 1.0
        self.has_lost_engine = error.code == LOST
        lost = EngineLost("The engines that ran this line were lost.")
        self.last_answer = LineAnswer(lost.status, request_id, lost.body())
        """If the line has lost so many engines that it is not tried again."""


class _Body(Struct, frozen=True):
    stream: Any = None


async def call(
    endpoint: ASGIApp,
    path: str,
    body: bytes,
    tenant: Tenant,
    gone: asyncio.Event,
    *,
    models_may_come: bool,
) -> LineAnswer:
    """Return the response to ``body``. Setting ``gone`` ends it like a client that closes its
    connection. With ``models_may_come``, wait for an unknown model.

    Raises `TryAgain`, and `ClientDisconnected` once ``gone`` is set."""
    request_id = f"req_{uuid.uuid4().hex}"
    scope = _scope(path, tenant, request_id)
    parts: list[bytes] = []
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    try:
        may_stream = b'"stream"' in body or b"\\u" in body  # a key may be written with escapes
        if may_stream and await asyncio.to_thread(_streams, body):
            raise InvalidValue("'stream' must be false in a batch.", param="stream")
        await endpoint(scope, receive, send)
    except (EngineLost, RequestCancelled) as error:  # the line may have crashed two engines
        return LineAnswer(error.status, request_id, error.body())
    except (TooManyRequests, Unavailable) as error:
        raise TryAgain(error, request_id) from None
    except ApiError as error:
        if models_may_come and isinstance(error, ModelNotFound):
            raise TryAgain(error, request_id) from None
        return LineAnswer(error.status, request_id, error.body())
    except ClientDisconnected:
        raise
    except Exception:
        logger.exception("a line of a batch raised an exception (%s)", request_id)
        failure = InternalError()
        return LineAnswer(failure.status, request_id, failure.body())
    size = sum(map(len, parts))
    join = partial(b"".join, parts)
    return LineAnswer(
        200, request_id, join() if size <= INLINE_SIZE else await asyncio.to_thread(join)
    )


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
