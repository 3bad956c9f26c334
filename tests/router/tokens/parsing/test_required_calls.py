"""Required calls, which a grammar allows alone after reasoning."""

from __future__ import annotations

import time
from typing import Any

import pytest

from router.tokens.parsing.calls import written_calls
from router.tokens.parsing.formats import CALL_FORMATS, ReplyState
from router.tokens.parsing.json_reader import JSON_STYLE
from router.tokens.parsing.marked import MarkedReplyParser
from router.tokens.reply_parser import ReplyDelta
from tests.router.tokens.parsing.test_marked import calls_in, format_of, pieces_of, read_with

ARGUMENTS = (
    '{"city": "a \\"b\\" } ] { \\\\", "end": "<think></tool_call>", '
    '"é🌍": [1, {"x": "}"}], "none": null}',
    "{}",
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "add_all")
]
PARSERS = [
    name
    for name, format in CALL_FORMATS.items()
    if not format.template.argument and format.style is JSON_STYLE
]


def written(parser: str) -> str:
    """Return a call of each tool."""
    pairs = zip(("add", "add_all"), ARGUMENTS, strict=True)
    functions = [{"name": name, "arguments": each} for name, each in pairs]
    return written_calls(CALL_FORMATS[parser], functions)


def reply_of(
    parser: str, state: ReplyState | None = None, *, single_call: bool = False
) -> MarkedReplyParser:
    format = format_of(parser)
    return MarkedReplyParser(
        format, state or format.initial_state, TOOLS, single_call=single_call, only_calls=True
    )


def calls_of(part: ReplyDelta) -> list[tuple[str | None, str]]:
    return [(call.name, call.arguments) for call in part.calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("parser", PARSERS)
def test_arguments_are_streamed(parser: str, size: int) -> None:
    reply = reply_of(parser)
    part = read_with(reply, pieces_of(written(parser), size))
    assert calls_of(part) == [("add", ARGUMENTS[0]), ("add_all", ARGUMENTS[1])]
    assert reply.called
    assert not (part.text + part.reasoning).strip()
    shown = map(reply_of(parser).feed, pieces_of(written(parser), size))
    assert sum(bool(calls_in(parts)) for parts in shown) > len(ARGUMENTS[0]) / 2 / size


@pytest.mark.parametrize("parser", ["json", "json_tools"])
@pytest.mark.parametrize("opened", [False, True])
def test_text_like_a_call_within_reasoning_stays_reasoning(parser: str, opened: bool) -> None:
    thought = CALL_FORMATS["json"].template.begin.replace("{name}", "add") + '{"city": 1'
    text = ("" if opened else "<think>") + f"{thought}</think>\n\n{written(parser)}"
    reply = reply_of(parser, ReplyState.REASONING if opened else None)
    part = read_with(reply, pieces_of(text, 2))
    assert part.reasoning == thought
    assert [call.name for call in part.calls] == ["add", "add_all"]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_that_is_cut_short_has_the_arguments_so_far(parser: str) -> None:
    text = written(parser)
    first = text.index(ARGUMENTS[0])
    for end in range(first + 1, len(text)):
        reply = reply_of(parser)
        part = read_with(reply, pieces_of(text[:end], 5), cut=True)
        name, arguments = calls_of(part)[0]
        assert name == "add" and ARGUMENTS[0][: end - first].startswith(arguments)
        assert len(ARGUMENTS[0][: end - first]) - len(arguments) < 8
        assert reply.called == (arguments == ARGUMENTS[0])
        assert not part.text.strip()


@pytest.mark.parametrize("parser", PARSERS)
def test_with_single_call_a_reply_is_complete_after_the_first(parser: str) -> None:
    reply, text = reply_of(parser, single_call=True), written(parser)
    end = text.index(ARGUMENTS[0]) + len(ARGUMENTS[0])
    for character in text[:end]:
        assert not reply.complete
        reply.feed(character)
    assert reply.complete


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_that_repeats_an_earlier_one_ends_the_calls(parser: str, size: int) -> None:
    functions = [{"name": "add", "arguments": {"a": value}} for value in (1, 12, 1, 3)]
    reply, text = reply_of(parser), written_calls(CALL_FORMATS[parser], functions)
    part = read_with(reply, pieces_of(text, size))
    assert calls_of(part) == [("add", '{"a": 1}'), ("add", '{"a": 12}')]
    assert reply.complete and reply.called
    assert not part.text.strip()


@pytest.mark.parametrize(("only_calls", "expected"), [(True, 2), (False, 4)])
def test_required_calls_in_other_forms_end_at_a_repeat_too(only_calls: bool, expected: int) -> None:
    call = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    text = "\n".join(call.format(value) for value in (1, 2, 1, 3))
    format = format_of("qwen3_coder")
    reply = MarkedReplyParser(format, ReplyState.NORMAL, TOOLS, only_calls=only_calls)
    assert len(read_with(reply, pieces_of(text, 5)).calls) == expected
    assert reply.complete == only_calls


def test_a_long_call_that_may_repeat_an_earlier_one_is_read_in_linear_time() -> None:
    def seconds(chars: int) -> float:
        template = CALL_FORMATS["json"].template
        begin = template.begin.replace("{name}", "add")
        call = f'{begin}{{"a": "{"x" * chars}"}}{template.end}'
        reply = reply_of("json")
        began = time.process_time()
        part = read_with(reply, pieces_of(call + template.between + call, 4))
        taken = time.process_time() - began
        assert len(part.calls) == 1 and reply.complete
        return taken

    short, long = (min(seconds(chars) for _ in range(3)) for chars in (20_000, 160_000))
    assert long < 24 * short  # 8 times the text; it was 64 times the work
