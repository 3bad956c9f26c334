"""Random calls with values that contain the markers of all formats, in each format, split and cut
anywhere."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest

from router.tokens.parsing.formats import CALL_FORMATS, HARMONY, REASONING, ReplyFormat
from router.tokens.parsing.marked import MarkedReplyParser
from router.tokens.reply_parser import ReplyDelta
from tests.router.tokens.parsing.test_marked import named, read_with
from tests.router.tokens.parsing.writers import WRITERS, Call, marks

STRING = {"type": "string"}
PROPERTIES: dict[str, Any] = {"s": STRING, "t": STRING, "i": {"type": "integer"}}
PROPERTIES |= {"o": {"type": "object"}, "a": {"type": "array"}, "b": {"type": "boolean"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("f", "g-2")
]
ALL_MARKS = sorted({mark for parser in CALL_FORMATS for mark in marks(parser)})
PIECES = (
    *(
        "a",
        " b",
        "é",
        "日本🌍",
        "\n",
        "\n    return x",
        "\\",
        '"',
        "'",
        "</",
        "<",
        "{",
        "}",
        "]",
        ")",
    ),
    *("\\d+", "if a < b && c:", "// x", "```", "null", "1,", "x: 1, y=2", "</think>", "<think>"),
    *ALL_MARKS,
)
EACH_FORMAT = pytest.mark.parametrize("parser", CALL_FORMATS)


def format_of(parser: str) -> ReplyFormat:
    return HARMONY if parser == "harmony" else ReplyFormat(REASONING["think"], CALL_FORMATS[parser])


def is_ambiguous(parser: str, value: str) -> bool:
    """Return whether no reader could tell the end of a value: there are no escapes."""
    format = CALL_FORMATS[parser]
    quotes = [each for each in format.style.quotes if len(each) > 1]
    if format.tags is None:
        return any(quote in value for quote in quotes)
    closers = (format.tags.close.replace("{key}", key) for key in PROPERTIES)
    return any(closer in value for closer in closers) or (parser == "minicpm5" and "]]>" in value)


def value_of(draw: random.Random, parser: str, key: str) -> Any:
    def text() -> str:
        while True:
            found = "".join(draw.choices(PIECES, k=draw.randrange(6)))
            if not is_ambiguous(parser, found) and not (
                parser in ("harmony", "minicpm5") and found != found.strip()
            ):
                return found

    match key:
        case "i":
            return draw.randrange(-5, 10**6)
        case "b":
            return draw.random() < 0.5
        case "o":
            return {"k": text(), "n": {"x": [1, None]}} if parser != "minimax_m3" else {"k": "v"}
        case "a":
            return [text(), {"y": text()}] if parser != "minimax_m3" else ["v", "w"]
    return text()


def calls_of(draw: random.Random, parser: str) -> list[Call]:
    names = (draw.choice(("f", "g-2")) for _ in range(draw.randrange(1, 4)))
    return [
        (name, {key: value_of(draw, parser, key) for key in draw.sample([*PROPERTIES], k=3)})
        for name in names
    ]


def split(draw: random.Random, text: str, count: int) -> list[str]:
    places = sorted(draw.randrange(len(text) + 1) for _ in range(count))
    return [text[start:end] for start, end in pairwise([0, *places, len(text)]) if start < end]


def parsed(parser: str, pieces: list[str], *, cut: bool = False) -> ReplyDelta:
    format = format_of(parser)
    return read_with(MarkedReplyParser(format, format.initial_state, TOOLS), pieces, cut=cut)


def bare(part: ReplyDelta) -> tuple[str, str, Any]:
    return part.reasoning, part.text, [(call.name, call.arguments) for call in part.calls]


@EACH_FORMAT
def test_calls_are_read_as_they_were_meant(parser: str) -> None:
    draw = random.Random(parser)
    for _ in range(60):
        calls = calls_of(draw, parser)
        written = WRITERS[parser](calls)
        before, after = "", ""
        if parser not in ("harmony", "json"):
            before, after = draw.choice(("", "Hi.\n")), draw.choice(("", "\nDone."))
        reasoning = draw.choice(("", "Use it.")) if parser != "harmony" else ""
        thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        text = thought + before + written + after
        whole = parsed(parser, [text])
        assert named(whole.calls) == calls, text
        assert (whole.reasoning, whole.text.split()) == (reasoning, (before + after).split())
        for count in (1, 2, 5, len(text)):
            assert bare(parsed(parser, split(draw, text, count))) == bare(whole), text
        assert bare(parsed(parser, [*text])) == bare(whole), text


@EACH_FORMAT
def test_a_reply_that_is_cut_has_calls_up_to_there_and_no_markup(parser: str) -> None:
    draw = random.Random(f"cut {parser}")
    for _ in range(25):
        calls = calls_of(draw, parser)
        before = "" if parser in ("harmony", "json") else "Hi.\n"
        text = before + WRITERS[parser](calls)
        begun = next(
            (len(before) + len(each) for each in CALL_FORMATS[parser].openers
             if text.startswith(each, len(before))), len(before),
        )  # fmt: skip
        end = draw.randrange(begun, len(text)) if begun < len(text) else begun
        whole = parsed(parser, [text[:end]], cut=True)
        assert bare(parsed(parser, [*text[:end]], cut=True)) == bare(whole), text[:end]
        if parser not in ("harmony", "json"):
            assert whole.text.strip() == "Hi.", text[:end]
        for call, (name, arguments) in zip(whole.calls, calls, strict=False):
            assert call.name == name
            try:
                complete = json.loads(call.arguments)
            except ValueError:
                continue
            assert complete == arguments, text[:end]


@EACH_FORMAT
def test_random_markers_do_not_depend_on_the_pieces(parser: str) -> None:
    draw = random.Random(f"soup {parser}")
    own = [*marks(parser), "f", '{"s": "x"}', "</think>", "<think>", "\n", " x ", "call:f{s:"]
    for _ in range(150):
        text = "".join(draw.choices([*own, *PIECES[:20]], k=draw.randrange(1, 14)))
        for cut in (False, True):
            whole = bare(parsed(parser, [text], cut=cut))
            for pieces in ([*text], split(draw, text, 3), split(draw, text, 1)):
                assert bare(parsed(parser, pieces, cut=cut)) == whole, text


def seconds(parser: str, pieces: list[str]) -> float:
    started = time.process_time()
    parsed(parser, pieces)
    return time.process_time() - started


@EACH_FORMAT
def test_long_replies_take_linear_time(parser: str) -> None:
    """The bounds are far above what these take: quadratic time would be minutes."""
    text = "def f(a):\n    return a < 1 and '</x>'\n" * 2500
    written = WRITERS[parser]([("f", {"s": text, "t": "x"})])
    pieces = [written[at : at + 4] for at in range(0, len(written), 4)]
    assert named(parsed(parser, pieces).calls) == [("f", {"s": text, "t": "x"})]
    assert seconds(parser, pieces) < 20
    many = WRITERS[parser]([("f", {"i": number}) for number in range(1000)])
    assert len(parsed(parser, [many]).calls) == 1000
    assert seconds(parser, [many[at : at + 4] for at in range(0, len(many), 4)]) < 20


@EACH_FORMAT
def test_markers_without_calls_take_linear_time(parser: str) -> None:
    for mark in marks(parser):
        pieces = [mark] * (30_000 // len(mark))
        assert seconds(parser, pieces) < 6
