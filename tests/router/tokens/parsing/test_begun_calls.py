"""Calls that a model makes of its own accord: streamed as soon as they can be nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from router.tokens.parsing.formats import ReplyState
from router.tokens.parsing.json_reader import JsonReader, repaired
from router.tokens.parsing.marked import MarkedReplyParser
from router.tokens.reply_parser import ReplyDelta
from tests.router.tokens.parsing.replies import BERLIN, REPLIES, TOKYO, TOOLS, Reply
from tests.router.tokens.parsing.test_marked import calls_in, format_of, named, read

LATE = ('"{\\"', '"Ada"', '\n{"city"', '[{"arguments"')
"""In replies whose first call is known only when its arguments are complete."""
STREAMED = [reply for reply in REPLIES if not any(each in reply.written for each in LATE)]


@pytest.mark.parametrize("reply", STREAMED, ids=lambda reply: reply.parser)
def test_a_call_is_shown_as_it_is_written(reply: Reply) -> None:
    format = format_of(reply.parser)
    parser = MarkedReplyParser(format, format.initial_state, TOOLS)
    shown = [calls_in(parser.feed(character)) for character in reply.written]
    begin = next(position for position, calls in enumerate(shown) if calls)
    first = shown[begin][0]
    (name, arguments), *_ = reply.calls
    assert first.name == name
    value = next(iter(arguments.values()))
    assert reply.written.index(str(value), begin) - begin < 80
    assert sum(map(bool, shown)) > len(str(value))


@pytest.mark.parametrize("reply", STREAMED, ids=lambda reply: reply.parser)
def test_what_is_shown_can_always_become_json(reply: Reply) -> None:
    format = format_of(reply.parser)
    parser = MarkedReplyParser(format, format.initial_state, TOOLS)
    shown: list[str] = []
    for character in reply.written:
        for call in calls_in(parser.feed(character)):
            shown += [""] * (call.name is not None)
            shown[-1] += call.arguments
            whole = json.dumps(reply.calls[len(shown) - 1][1], ensure_ascii=False)
            assert whole.startswith(shown[-1]) or shown[-1] in reply.written


def tagged_call_of(*arguments: str, end: str = "</function>\n</tool_call>") -> str:
    written = "".join(f"<parameter={each}\n</parameter>\n" for each in arguments)
    return "<tool_call>\n<function=get_weather>\n" + written + end


def test_whitespace_between_arguments_takes_linear_time() -> None:
    call = "<tool_call><function=get_weather><parameter=city>x</parameter>"
    started = time.process_time()
    parser = MarkedReplyParser(format_of("qwen3_coder"), ReplyState.NORMAL, TOOLS)
    for piece in [call, *[" "] * 200_000, "</function>"]:
        parser.feed(piece)
    assert named(read("", format_of("qwen3_coder")).calls) == []
    assert time.process_time() - started < 5


def test_text_is_shown_up_to_what_may_be_a_tag() -> None:
    parser = MarkedReplyParser(format_of("qwen3_coder"), ReplyState.NORMAL, TOOLS)
    written = tagged_call_of("city>\nBer\nlin</p", "days>\n3")
    parts = [part for character in written for part in parser.feed(character)]
    calls = calls_in([*parts, *parser.finish()])
    assert calls[0].name == "get_weather"
    pieces = [call.arguments for call in calls]
    assert pieces[:4] == ["", '{"city": ', '"', "B"]
    assert pieces[6:9] == ["\\nl", "i", "n"]
    assert "".join(pieces) == '{"city": "Ber\\nlin</p", "days": 3}'


def gemma(arguments: str) -> str:
    return f"<|tool_call>call:get_weather{{{arguments}}}<tool_call|>"


def pythonic(calls: str) -> str:
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_json_without_a_marker_is_a_call_once_its_arguments_begin(size: int) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "x", }}'
    for before, after, text in (
        ("```json\n", "\n```", ""),
        *((fence, "", "") for fence in ("```tool_code", "```tool_call\n[", "<|python_start|>```")),
        ("<|python_tag|>[", "", ""),
        ("", " is how.", " is how."),
    ):
        part = read(before + call + after, format_of("json"), size=size)
        assert (named(part.calls), part.text) == ([("get_weather", {"city": "x"})], text)
    part = read(call[:-6], format_of("json"), size=size)
    assert named(part.calls) == [("get_weather", '{"city": "')]
    for no_call in (call.replace("get_weather", "other"), f"So: {call}"):
        assert read(no_call, format_of("json"), size=size) == ReplyDelta("", no_call)


def call_of(arguments: str, end: str = "\n</tool_call>") -> str:
    return '<tool_call>\n{"name": "get_weather", "arguments": ' + arguments + end


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("parser", "written", "calls"),
    [
        ("gemma4", gemma('city:<|"|>a,}b)<|"|>'), [{"city": "a,}b)"}]),
        ("gemma4", gemma('units:[<|"|>x<|"|>,<|"|>y<|"|>],a:3'), [{"units": ["x", "y"], "a": 3}]),
        ("gemma4", gemma('city:{a:{b:<|"|>}<|"|>}}'), [{"city": {"a": {"b": "}"}}}]),
        ("gemma4", gemma("city:Berlin"), [{"city": "Berlin"}]),
        ("gemma4", gemma('city:<|"|>x<|"|>}call:get_weather{days:1'), [{"city": "x"}, {"days": 1}]),
        ("pythonic", pythonic("get_weather(a='it\\'s, )]', b=-1)"), [{"a": "it's, )]", "b": -1}]),
        ("pythonic", pythonic("get_weather(a='\\\\', b=-1)"), [{"a": "\\", "b": -1}]),
        ("pythonic", pythonic("get_weather(units=['a', \"b,\"])"), [{"units": ["a", "b,"]}]),
        ("pythonic", pythonic("get_weather(city=None), get_weather()"), [{"city": None}, {}]),
        ("pythonic", pythonic("get_weather(a=open('x'), b=1)"), [{"a": "open('x')", "b": 1}]),
        ("qwen3_coder", tagged_call_of("city>\na</tool_call>\nb"), [{"city": "a</tool_call>\nb"}]),
        ("qwen3_coder", tagged_call_of(end="<parameter=city>\nx\n</function>\n</tool_call>"),
         [{"city": "x"}]),
        ("qwen3_coder", tagged_call_of("days>\nmany", "city>\nx"), [{"days": "many", "city": "x"}]),
        ("qwen3_coder", tagged_call_of("city>\nx", end="</tool_call>"), [{"city": "x"}]),
        ("qwen3_coder", tagged_call_of("city>\nx", end=""), [{"city": "x"}]),
        ("json_tools", call_of('{"city": "a\nb\tc",}}'), [{"city": "a\nb\tc"}]),
        ("json_tools", call_of('{"city": "x"'), [{"city": "x"}]),
        ("json_tools", call_of('{"units": ["x", "y"', end=""), [{"units": ["x", "y"]}]),
        ("json_tools", call_of('{"days": [1, 2 , ], "city": None }}'),
         [{"days": [1, 2], "city": None}]),
        ("json_tools", call_of('{"city": "</tool_call>"}}'), [{"city": "</tool_call>"}]),
        ("json_tools", call_of('{"city": "x"}, "id": "a"}'), [{"city": "x"}]),
        ("json_tools", call_of('{"city": x}}'), ['{"city": x}']),
        ("json_tools", call_of('{"city": "say "hi""}}'), ['{"city": "say "hi""}']),
        ("json_tools", call_of('{"city": "\\d C:\\Us it\\\'s"}}'), [{"city": "\\d C:\\Us it's"}]),
        ("json_tools", call_of('{"city": "x'), ['{"city": "x\\n</tool_call>']),
    ],
)  # fmt: skip
def test_arguments_end_outside_of_strings_and_slips_are_mended(
    parser: str, written: str, calls: Any, size: int
) -> None:
    part = read(written, format_of(parser), size=size)
    assert (named(part.calls), part.text) == ([("get_weather", each) for each in calls], "")


@pytest.mark.parametrize("parser", ["deepseek_v3", "deepseek_v31", "kimi_k2"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_call_without_its_last_bracket_ends_before_the_next(parser: str, size: int) -> None:
    reply = next(reply for reply in REPLIES if reply.parser == parser)
    first = BERLIN | {"city": "x<｜tool▁call▁end｜>```<|tool_call_end|>"}
    written = reply.written.replace('"Berlin"', json.dumps(first["city"], ensure_ascii=False))
    part = read(written.replace("3}", "3"), format_of(parser), size=size)
    assert named(part.calls) == [("get_weather", first), ("get_weather", TOKYO)]
    assert part.text == reply.text


def test_a_call_cut_short_is_not_mended() -> None:
    part = read(call_of('{"units": ["x", ', end=""), format_of("json_tools"), cut=True)
    assert named(part.calls) == [("get_weather", '{"units": ["x"')]


@pytest.mark.parametrize("size", [1, 1000])
def test_text_behind_the_calls_of_a_section_is_text(size: int) -> None:
    written = '[TOOL_CALLS]get_weather[ARGS]{"city": "x"}[TOOL_CALLS]nothing[ARGS]{} so.'
    part = read(written, format_of("mistral"), size=size)
    assert named(part.calls) == [("get_weather", {"city": "x"})]
    assert part.text == "[TOOL_CALLS]nothing[ARGS]{} so."


def test_a_call_within_reasoning_is_known_only_when_it_is_whole() -> None:
    parser = MarkedReplyParser(format_of("json_tools"), ReplyState.REASONING, TOOLS)
    assert not parser.feed(call_of('{"city": "x"', end=""))
    assert len({call.number for call in calls_in(parser.feed("}}</tool_call>"))}) == 1


def test_a_call_of_the_models_own_accord_keeps_its_id() -> None:
    (reply,) = (reply for reply in REPLIES if reply.parser == "kimi_k2")
    ids = [call.id for call in read(reply.written, format_of("kimi_k2")).calls]
    assert ids == ["functions.get_weather:0", "functions.get_weather:1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [True, {"b": -1.5e3', '{"a": [true, {"b": -1.5e3}]}'),
        ('{"a": "\\u00e9\x01"}', '{"a": "\\u00e9\\u0001"}'),
        ("{", "{}"),
        *((wrong, None) for wrong in ('{"a": 1,,}', "{,}", '{"a" 1}', '{"a": 01}', '{"a": 1]')),
        ('{"a": "\\d"}', '{"a": "\\\\d"}'),
        *((wrong, None) for wrong in ('{"a":', '{"a": "x', '{"a"', "{} x", "x")),
    ],
)
def test_json_is_mended_where_it_can_mean_one_thing(text: str, expected: str | None) -> None:
    assert repaired(text) == expected
    for size in (1, 2, 3):
        reader = JsonReader()
        for at in range(0, len(text), size):
            reader.feed(text[at : at + size])
        reader.finish()
        whole = reader.take()
        if expected is not None:
            assert whole == expected and reader.complete
        else:
            assert reader.broken or text == "{} x"


@pytest.mark.parametrize("end", ["\\\\", "\\\\u12"])
def test_text_that_ends_within_an_escape_is_passed_on_once(end: str) -> None:
    reader = JsonReader()
    reader.feed('{"a": "x' + end[1:])
    reader.finish()
    assert reader.take() == '{"a": "x' + end
