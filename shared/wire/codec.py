"""Encoding of messages to frames, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec

from shared.version import installed_version

PROTOCOL_VERSION = 1
SUPPORTED_VERSIONS = (1,)
"""Protocol versions that this release understands: its own, and the previous one if there is one.
"""

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_FRAMES = 4096


def other_version(protocol: int) -> str | None:
    """Return, as the end of a sentence about a peer, how its ``protocol`` differs from those of
    this release and what to do; None if this release understands it."""
    if protocol in SUPPORTED_VERSIONS:
        return None
    here = " and ".join(map(str, SUPPORTED_VERSIONS))
    older = "this process" if protocol > max(SUPPORTED_VERSIONS) else "the other process"
    return (
        f"uses protocol {protocol}, and this process (mlx-lm-server {installed_version()}) "
        f"{here}: upgrade {older}"
    )


class WireError(Exception):
    """A message that cannot be decoded: wrong framing, type or field."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base class of all messages."""


def encode(message: Message, *payload: bytes | memoryview) -> list[bytes | memoryview]:
    """Return the frames of ``message``: its header, then ``payload`` unchanged."""
    return [msgspec.msgpack.encode(message), *payload]


def decode(frames: Sequence[bytes | memoryview], expected: Any) -> tuple[Any, list[bytes]]:
    """Return the message in ``frames``, and its raw frames.

    ``expected`` is a union of message types (`ToEngine`, ...).
    Raises: `WireError` for any other type of message, and for malformed frames.
    """
    if not frames:
        raise WireError("message without frames")
    if len(frames) > MAX_FRAMES:
        raise WireError(f"message of {len(frames)} frames, the limit is {MAX_FRAMES}")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(frames[0])} bytes, the limit is {MAX_HEADER_BYTES}")
    try:
        message = _decoder(expected).decode(frames[0])
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error
    return message, [bytes(frame) for frame in frames[1:]]


@cache
def _decoder(expected: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(expected)
