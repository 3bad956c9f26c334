"""Framing of server-sent events."""

from __future__ import annotations

MEDIA_TYPE = b"text/event-stream; charset=utf-8"

_BREAKS = {each.encode(): b"\\u%04x" % ord(each) for each in "\x85\u2028\u2029"}
"""Line breaks by their bytes, with their escapes: legal in JSON, but many clients split lines there
too."""


def encode_event(data: bytes, name: str | None = None) -> bytes:
    """Return one event with ``data``, which is JSON in UTF-8 without ASCII line breaks."""
    data = on_one_line(data)
    if name is None:
        return b"data: %s\n\n" % data
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def on_one_line(data: bytes) -> bytes:
    """Return JSON with the Unicode characters escaped at which clients may split lines."""
    if not data.isascii():
        for line_break, escape in _BREAKS.items():  # faster than a regular expression
            data = data.replace(line_break, escape)
    return data
