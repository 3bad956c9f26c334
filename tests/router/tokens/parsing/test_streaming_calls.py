"""Calls that are passed on while they are generated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.tokens.parsing.formats import ReplyState
from router.tokens.parsing.grammars import CALL_TEMPLATES
from router.tokens.parsing.marked import MarkedReplyParser
from router.tokens.parsing.streaming_calls import StreamingCallParser
from router.tokens.reply_parser import CallDelta, ReplyDelta
from tests.router.tokens.parsing.test_marked import format_of

ARGUMENTS = (
    '{"city": "a \\"b\\" } ] { \\\\", "end": "<think></tool_call>", '
    '"é🌍": [1, {"x": "}"}], "none": null}',
    "{}",
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "add_all")
]
PARSERS = [name for name, template in CALL_TEMPLATES.items() if not template.argument]


def written(parser: str) -> str:
    """Return a call of each tool."""
    template = CALL_TEMPLATES[parser]
    calls = [
        template.begin.replace("{name}", tool["function"]["name"]).replace("{number}", str(number))
        + ARGUMENTS[number]
        + template.end
        for number, tool in enumerate(TOOLS)
    ]
    return template.before + template.between.join(calls) + template.after


def reply_of(
    parser: str, state: ReplyState | None = None, *, single_call: bool = False
) -> MarkedReplyParser:
    format = format_of(parser)
    stream = StreamingCallParser(CALL_TEMPLATES[parser], ("add", "add_all"))
    return MarkedReplyParser(
        format, state or format.initial_state, TOOLS, single_call=single_call, call_stream=stream
    )


def parts_of(
    reply: MarkedReplyParser, text: str, size: int, *, cut: bool = False
) -> list[ReplyDelta]:
    parts = [reply.feed(text[start : start + size]) for start in range(0, len(text), size)]
    return [*parts, reply.finish(cut=cut)]


def calls_of(parts: list[ReplyDelta]) -> list[tuple[str | None, str]]:
    """Return names and arguments. Check that ids come once, with the names."""
    calls: list[list[str | None]] = []
    ids: list[str | None] = []
    for delta in (delta for part in parts for delta in part.calls):
        assert isinstance(delta, CallDelta)
        if delta.number == len(calls):
            calls.append([delta.name, ""])
            ids.append(delta.id)
        else:
            assert delta.name is delta.id is None
        calls[delta.number][1] += delta.arguments  # type: ignore[operator]
    assert len(set(ids)) == len(ids) and None not in ids
    return [(name, arguments or "") for name, arguments in calls]


@pytest.mark.parametrize("size", [1, 3, 20, 1000])
@pytest.mark.parametrize("parser", PARSERS)
def test_arguments_are_streamed(parser: str, size: int) -> None:
    reply = reply_of(parser)
    parts = parts_of(reply, written(parser), size)
    assert calls_of(parts) == [("add", ARGUMENTS[0]), ("add_all", ARGUMENTS[1])]
    assert reply.called
    assert not "".join(part.text + part.reasoning for part in parts).strip()
    if size == 1:
        assert sum(bool(part.calls) for part in parts) > len(ARGUMENTS[0]) / 2


@pytest.mark.parametrize("parser", ["json", "json_tools"])
@pytest.mark.parametrize("opened", [False, True])
def test_text_like_a_call_within_reasoning_stays_reasoning(parser: str, opened: bool) -> None:
    thought = CALL_TEMPLATES["json"].begin.replace("{name}", "add") + '{"city": 1'
    text = ("" if opened else "<think>") + f"{thought}</think>\n\n{written(parser)}"
    reply = reply_of(parser, ReplyState.REASONING if opened else None)
    parts = parts_of(reply, text, 2)
    assert "".join(part.reasoning for part in parts) == thought
    assert [name for name, _ in calls_of(parts)] == ["add", "add_all"]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_that_is_cut_short_has_the_arguments_so_far(parser: str) -> None:
    text = written(parser)
    first = text.index(ARGUMENTS[0])
    for end in range(first, len(text)):
        reply = reply_of(parser)
        parts = parts_of(reply, text[:end], 5, cut=True)
        name, arguments = calls_of(parts)[0]
        assert name == "add" and arguments == ARGUMENTS[0][: end - first]
        assert reply.called == (arguments == ARGUMENTS[0])
        assert not "".join(part.text for part in parts).strip()


@pytest.mark.parametrize("parser", PARSERS)
def test_with_single_call_a_reply_is_complete_after_the_first(parser: str) -> None:
    reply = reply_of(parser, single_call=True)
    for number, character in enumerate(written(parser)):
        assert not reply.complete, number
        reply.feed(character)
        if number == written(parser).index(ARGUMENTS[0]) + len(ARGUMENTS[0]) - 1:
            break
    assert reply.complete
    assert json.loads(ARGUMENTS[0])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_that_repeats_an_earlier_one_ends_the_calls(parser: str, size: int) -> None:
    template = CALL_TEMPLATES[parser]
    begin = template.begin.replace("{name}", "add").replace("{number}", "0")
    arguments = ['{"a": 1}', '{"a": 12}', '{"a": 1}', '{"a": 3}']
    calls = [begin + each + template.end for each in arguments]
    reply = reply_of(parser)
    parts = parts_of(reply, template.before + template.between.join(calls) + template.after, size)
    assert calls_of(parts) == [("add", '{"a": 1}'), ("add", '{"a": 12}')]
    assert reply.complete and reply.called
    assert not "".join(part.text for part in parts).strip()


def test_required_calls_in_other_forms_end_at_a_repeat_too() -> None:
    call = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    text = "\n".join(call.format(value) for value in (1, 2, 1, 3))
    for only_calls, expected in ((True, 2), (False, 4)):
        reply = MarkedReplyParser(
            format_of("qwen3_coder"), ReplyState.NORMAL, TOOLS, only_calls=only_calls
        )
        assert len(calls_of(parts_of(reply, text, 5))) == expected
        assert reply.complete == only_calls
