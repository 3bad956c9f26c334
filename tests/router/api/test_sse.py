"""Server-sent events."""

from __future__ import annotations

import json

import msgspec

from router.api.sse import encode_event

EVERY_BREAK = "a\r\nb\vc\fd\x1ce\x1df\x1eg\x85h\u2028i\u2029j \u200b\u0385"


def test_no_text_breaks_an_event_for_clients_that_split_at_any_line_break() -> None:
    sent = encode_event(msgspec.json.encode({"text": EVERY_BREAK}), "delta").decode()
    assert sent.endswith("\n\n")
    assert len(sent.splitlines()) == 3
    name, data, end = sent.splitlines()
    assert (name, end) == ("event: delta", "")
    assert json.loads(data.removeprefix("data: ")) == {"text": EVERY_BREAK}


def test_other_text_is_sent_unchanged() -> None:
    assert encode_event("{é😀 \u200b}".encode()) == "data: {é😀 \u200b}\n\n".encode()
