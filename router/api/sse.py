"""Framing of server-sent events."""

from __future__ import annotations

import re

MEDIA_TYPE = b"text/event-stream; charset=utf-8"

_BREAKS = re.compile(rb"\xc2\x85|\xe2\x80[\xa8\xa9]")
"""U+0085, U+2028, U+2029: legal in JSON, but many clients split lines there too."""


def encode_event(data: bytes, name: str | None = None) -> bytes:
    """Return one event with ``data``, which is JSON in UTF-8 without ASCII line breaks."""
    data = on_one_line(data)
    if name is None:
        return b"data: %s\n\n" % data
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def on_one_line(data: bytes) -> bytes:
    """Return JSON with the Unicode characters escaped at which clients may split lines."""
    return data if data.isascii() else _BREAKS.sub(_escaped, data)


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())
