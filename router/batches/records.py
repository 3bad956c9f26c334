"""Lines of output and error files, in OpenAI's format."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.api.sse import on_one_line
from router.batches.store import Result


class LineResponse(Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: Raw


class LineError(Struct, frozen=True, kw_only=True):
    code: str
    message: str


class LineRecord(Struct, frozen=True, kw_only=True):
    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None


class _Details(Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(Struct, frozen=True):
    """Usage of completions and embeddings, or of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(Struct, frozen=True):
    usage: _Usage | None = None


def answered(
    batch: int, line: int, custom_id: str, status: int, request_id: str, body: bytes
) -> Result:
    """Return the result of an answered line; the answer is JSON."""
    response = LineResponse(status_code=status, request_id=request_id, body=Raw(body))
    record = _encoded(custom_id, response=response)
    if status != 200:
        return Result(batch, line, False, record)
    usage = msgspec.json.decode(body, type=_Answer).usage or _Usage()
    before = usage.input_tokens_details or usage.prompt_tokens_details or _Details()
    after = usage.output_tokens_details or usage.completion_tokens_details or _Details()
    return Result(
        batch,
        line,
        True,
        record,
        input_tokens=usage.input_tokens or usage.prompt_tokens,
        cached_tokens=before.cached_tokens,
        output_tokens=usage.output_tokens or usage.completion_tokens,
        reasoning_tokens=after.reasoning_tokens,
    )


def not_run(batch: int, line: int, custom_id: str, code: str, message: str) -> Result:
    """Return the result of a line that has not run."""
    record = _encoded(custom_id, error=LineError(code=code, message=message))
    return Result(batch, line, False, record)


def _encoded(custom_id: str, **fields: Any) -> bytes:
    record = LineRecord(id=f"batch_req_{uuid.uuid4().hex}", custom_id=custom_id, **fields)
    return on_one_line(msgspec.json.encode(record)) + b"\n"
