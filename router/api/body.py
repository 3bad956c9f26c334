"""JSON bodies. Those of requests are bounded in size and time, also if chunked or compressed."""

from __future__ import annotations

import asyncio
import time
import zlib
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientDisconnected,
    InvalidRequest,
    UnsupportedMediaType,
)
from router.schemas.requests import RequestBody, parse_body

BODY_TIMEOUT_S = 30.0
_DISCARD_S = 2.0
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}

_Body = TypeVar("_Body", bound=RequestBody)


async def read_body(request: Request, max_bytes: int, body_type: type[_Body]) -> _Body:
    """Return the body as a ``body_type``. Raises what `read_json_body` and `parse_body` raise."""
    return parse_body(await read_json_body(request, max_bytes), body_type)


async def read_json_body(
    request: Request, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Return the decompressed body, which has at most ``max_bytes``.

    Raises `UnsupportedMediaType` for another media type or an unknown compression,
    `BodyTooLarge`, `BodyTimeout`, `InvalidRequest` for damaged compression, and
    `ClientDisconnected`.
    """
    _check_media_type(request.headers.get("content-type"))
    encoding = request.headers.get("content-encoding", "identity").strip().lower() or "identity"
    if encoding != "identity" and encoding not in _WINDOW_BITS:
        raise UnsupportedMediaType(
            f"Content-Encoding '{encoding}' is not supported; use gzip, deflate or none."
        )
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {timeout_s:g} s.") from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    return raw if encoding == "identity" else _decompress(raw, _WINDOW_BITS[encoding], max_bytes)


def _check_media_type(content_type: str | None) -> None:
    if content_type is None:
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"The body must be application/json, not '{media_type}'.")


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    too_large_since: float | None = None
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif too_large_since is None:
            chunks.clear()
            too_large_since = time.monotonic()
        # Read on for a moment: closing while the client still sends resets the connection,
        # and the client would never see the answer.
        elif time.monotonic() - too_large_since > _DISCARD_S or size > 16 * max_bytes:
            break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(chunks)


def _decompress(raw: bytes, window_bits: int, max_bytes: int) -> bytes:
    inflate = zlib.decompressobj(window_bits)
    try:
        body = inflate.decompress(raw, max_bytes + 1)
    except zlib.error:
        raise InvalidRequest("The compressed body is damaged.", code="invalid_json") from None
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not inflate.eof:
        raise InvalidRequest("The compressed body is cut short.", code="invalid_json")
    return body


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes.")


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
