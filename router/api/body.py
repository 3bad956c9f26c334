"""JSON bodies. Request bodies are bounded in size and time, also if chunked or compressed."""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
from starlette.datastructures import State
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Send

from router.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientDisconnected,
    InvalidRequest,
    UnsupportedMediaType,
)
from router.fleet.body_budget import BodyBytes
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.images.memory import HeldMemory
from router.schemas.body import RequestBody, parse_body

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BODY_TIMEOUT_S = 30.0
_DISCARD_S = 2.0
_SMALL_PIECE_BYTES = 16 * 1024
"""A larger piece of a body takes a turn, see `BodyBudget`: connections are read in pieces of up to
256 KB."""
_PIECE_BYTES = 256 * 1024
_AROUND_IMAGES_BYTES = 65536
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_ZSTD: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
"""The largest window that HTTP allows (RFC 9659)."""

_Body = TypeVar("_Body", bound=RequestBody)


async def read_body(request: Request, router: Router, body_type: type[_Body]) -> tuple[_Body, int]:
    """Return the body as a ``body_type``, and its size. Large bodies are decoded off the event
    loop.

    An uncompressed body with images may be larger if a model accepts images. Raises what
    `receive_body`, `parse_body` and `HeldMemory.hold` raise.
    """
    max_bytes = router.max_request_bytes
    room = None
    if body_type.may_have_images and router.takes_images:
        room = ImageRoom(router.settings.max_image_bytes, held_memory(router, request.state))
    share = request.state.tenant.share
    with router.bodies.reading(share) as counted:
        raw, encoding = await receive_body(
            request, max_bytes, counted, any_media_type=body_type.any_media_type, room=room
        )
        return await _parsed(router, share, raw, encoding, body_type)


async def _parsed(
    router: Router, share: str, raw: bytes, encoding: str | None, body_type: type[_Body]
) -> tuple[_Body, int]:
    max_bytes = router.max_request_bytes

    def parse() -> tuple[_Body, int]:
        body = raw if encoding is None else _decompress(raw, encoding, max_bytes)
        if len(body) > router.max_request_values:
            _check_values(body, router.max_request_values)
        parsed = parse_body(body, body_type)
        if len(body) > max_bytes and len(body) - parsed.image_chars > max_bytes:
            raise BodyTooLarge(f"Without its images, the body is larger than {max_bytes} bytes.")
        return parsed, len(body)

    return await router.work.run_large(share, parse, len(raw) if encoding is None else max_bytes)


def held_memory(router: Router, state: State) -> HeldMemory:
    """Return the object that counts the request's image memory. The middleware closes it."""
    found: HeldMemory | None = getattr(state, "image_memory", None)
    if found is None:
        tenant: Tenant = state.tenant
        found = state.image_memory = HeldMemory(
            router.images.memory, tenant.share, alone=tenant.alone
        )
    return found


class ImageRoom(NamedTuple):
    """The extra size allowed for images in a body, and the memory that holds them."""

    max_image_bytes: int
    held: HeldMemory

    @property
    def max_chars(self) -> int:
        """The size in base64, plus some for the JSON around each image."""
        return self.max_image_bytes * 4 // 3 + _AROUND_IMAGES_BYTES


async def receive_body(
    request: Request,
    max_bytes: int,
    counted: BodyBytes,
    timeout_s: float = BODY_TIMEOUT_S,
    *,
    any_media_type: bool = False,
    room: ImageRoom | None = None,
) -> tuple[bytes, str | None]:
    """Return the body as sent, with at most ``max_bytes``, and its compression, if any. Its bytes
    are ``counted``, except those for which images have ``room``.

    Raises `UnsupportedMediaType` for another media type or an unknown compression, `BodyTooLarge`,
    `BodyTimeout`, and `ClientDisconnected`. With ``any_media_type``, only web pages must declare
    JSON: a page can post a form to any site without permission, and browsers send its origin.
    """
    content_type, from_page = request.headers.get("content-type"), "origin" in request.headers
    if from_page and content_type is None:  # a page may send this type to any site too
        raise UnsupportedMediaType("Web pages must send the body as application/json.")
    if from_page or not any_media_type:
        _check_media_type(content_type)
    encoding = request.headers.get("content-encoding", "identity").strip().lower() or "identity"
    if encoding not in ("identity", "zstd", *_WINDOW_BITS):
        raise UnsupportedMediaType(
            f"Content-Encoding '{encoding}' is not supported; use gzip, deflate, zstd or none."
        )
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes, counted, room if encoding == "identity" else None)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {timeout_s:g} s.") from None
    except ClientDisconnect:
        await counted.turn()  # hundreds may leave at once
        raise ClientDisconnected from None
    return raw, None if encoding == "identity" else encoding


def _check_media_type(content_type: str | None) -> None:
    if content_type is None:
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"The body must be application/json, not '{media_type}'.")


async def _read(
    request: Request, max_bytes: int, counted: BodyBytes, room: ImageRoom | None
) -> bytes:
    body = bytearray()  # a list of small pieces would take many times their size
    size = 0
    plain_bytes = max_bytes
    max_bytes += 0 if room is None else room.max_chars
    too_large_since: float | None = None
    async for chunk in request.stream():
        size += len(chunk)
        if room is not None and plain_bytes < size <= max_bytes:
            room.held.hold(len(chunk))
        elif size <= max_bytes:
            counted.add(len(chunk))
        if size <= max_bytes:
            body += chunk
        elif too_large_since is None:
            body.clear()
            counted.release()
            too_large_since = time.monotonic()
        # Keep reading for a moment: closing while the client is still sending resets the
        # connection, and the client would never see the answer.
        elif time.monotonic() - too_large_since > _DISCARD_S or size > 16 * max_bytes:
            break
        if len(chunk) > _SMALL_PIECE_BYTES:
            await counted.turn()
    if size > max_bytes:
        raise _too_large(max_bytes)
    return bytes(body)


def _decompress(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return ``raw`` decompressed. Raises `InvalidRequest` if it is damaged, `BodyTooLarge`."""
    inflate = (
        zstd.ZstdDecompressor(options=_ZSTD)
        if encoding == "zstd"
        else zlib.decompressobj(_WINDOW_BITS[encoding])
    )
    try:
        body = inflate.decompress(raw, max_bytes + 1)
    except (zlib.error, zstd.ZstdError):
        raise InvalidRequest("The compressed body is corrupt.", code="invalid_json") from None
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    if not inflate.eof:
        raise InvalidRequest("The compressed body is truncated.", code="invalid_json")
    return body


def _check_values(body: bytes, most: int) -> None:
    """Raise `BodyTooLarge` if ``body`` may contain more JSON values than a body of ``most`` bytes:
    decoding them blocks the interpreter. Base64 contains none of the counted characters."""
    count = 0
    for start in range(0, len(body), _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        count += piece.count(b",") + piece.count(b"[") + piece.count(b"{")
        if count > most:
            raise BodyTooLarge(f"The body has more values than a body of {most} bytes can hold.")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes.")


async def send_json(
    send: Send, pieces: Sequence[bytes], headers: Sequence[tuple[bytes, bytes]]
) -> None:
    """Send an answer in small pieces, so that only one is buffered for a slow client."""
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-length", str(sum(map(len, pieces))).encode()),
                (b"content-type", b"application/json"),
                *headers,
            ],
        }
    )
    for piece in pieces:
        await send_body(send, piece)
    await send_body(send, b"", more=False)


async def send_body(send: Send, body: bytes, more: bool = True) -> None:
    """Send a part of a body, in pieces: each `send` copies what it is given on the event loop."""
    end = 0
    while len(body) - end > _PIECE_BYTES:
        start, end = end, end + _PIECE_BYTES
        await send({"type": "http.response.body", "body": body[start:end], "more_body": True})
    last = body[end:] if end else body
    await send({"type": "http.response.body", "body": last, "more_body": more})


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
