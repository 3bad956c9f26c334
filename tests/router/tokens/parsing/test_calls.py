"""Calls as objects of JSON, and the types of values without quotes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from router.tokens.parsing.calls import written_calls
from router.tokens.parsing.formats import CALL_FORMATS, ReplyState
from router.tokens.parsing.marked import MarkedReplyParser
from tests.router.tokens.parsing.replies import REPLIES, TOOLS
from tests.router.tokens.parsing.test_marked import format_of, named, read, read_with

CALL = '{"name": "get_weather", "arguments": {"city": "Berlin"}}'


@pytest.mark.parametrize(
    ("reply", "count"),
    [
        (CALL, 1),
        (f"```json\n{CALL}\n```", 1),
        (f"```tool_call {CALL}```", 1),
        (f"``` \n{CALL}", 1),
        (f"<|python_tag|>```tool_code\n{CALL}\n```  ", 1),
        *((fence, 0) for fence in ("```", "``````", "```json", "```json```", "``` ```", "````")),
    ],
)
def test_calls_may_stand_in_a_fence(reply: str, count: int) -> None:
    for size in (1, len(reply)):
        part = read(reply, format_of("json"), size=size)
        assert named(part.calls) == [("get_weather", {"city": "Berlin"})] * count
        assert part.text.strip() == ("" if count else reply)


@pytest.mark.parametrize("end", ["", "x", "```", f"{CALL}```"])
def test_whitespace_in_a_fence_takes_linear_time(end: str) -> None:
    started = time.process_time()
    read("```" + " \n" * 200_000 + end, format_of("json"), size=1000)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "get_weather", "city": "x"}',
        '{"name": "get_weather", "type": "person"}',
        '{"name": "get_weathers", "arguments": {}}',
        '{"type": "object", "name": "get_weather"}',
        '{"name": "Ada", "arguments": {"city": "x"}}',
    ],
)
def test_json_that_is_no_call_is_text_at_once(written: str) -> None:
    parser = MarkedReplyParser(format_of("json"), ReplyState.NORMAL, TOOLS)
    parts = [part for character in written for part in parser.feed(character)]
    assert "".join(part.text for part in parts) == written
    assert not parser.finish()


def test_a_name_alone_is_a_call_without_arguments() -> None:
    for written in ('{"name": "get_weather"}', '{"name": "get_weather", "arguments": null}'):
        assert named(read(written, format_of("json")).calls) == [("get_weather", {})]


def test_a_call_of_mistrals_keeps_its_id() -> None:
    for between, id in (("", None), (" [CALL_ID]a1b2 ", "a1b2"), ("[CALL_ID]", None)):
        written = f'[TOOL_CALLS]get_weather{between}[ARGS] {{"city": "x"}}'
        (call,) = read(written, format_of("mistral")).calls
        assert (call.name, call.arguments) == ("get_weather", '{"city": "x"}')
        assert call.id == id if id else call.id is not None


TAG = "]<]minimax[>["
"""Before each tag of MiniMax M3."""
OBJECT = '{"name": "f", "arguments": {"city": "B<", "days": 3}}'
PAIRS = (
    "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>B<</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
WRITTEN = {
    "granite": f"<|tool_call|>[{OBJECT}]",
    "jamba": f"<tool_calls>[{OBJECT}]</tool_calls>",
    "phi4_mini": f"<|tool_call|>[{OBJECT}]<|/tool_call|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="0"<|sep|><|open|>json '
    'type="object"<|sep|>{"city": "B<", "days": 3}<|close|>json<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "glm47": PAIRS,
    "longcat": PAIRS.replace("tool_call", "longcat_tool_call").replace("arg_", "longcat_arg_"),
    "minicpm5": '<function name="f"><param name="city">B<</param><param name="days">3</param>'
    "</function>",
    "minimax_m3": f'{TAG}<tool_call>\n{TAG}<invoke name="f">{TAG}<city>B<{TAG}</city>{TAG}<days>3'
    f"{TAG}</days>{TAG}</invoke>\n{TAG}</tool_call>",
    "pythonic": '<|tool_call_start|>[f(city="B<", days=3)]<|tool_call_end|>',
}
"""A call as each family's template writes it, of those whose `REPLIES` differ from it."""


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_calls_are_written_as_each_family_does(parser: str) -> None:
    format = CALL_FORMATS[parser]
    if parser in WRITTEN:
        arguments = {"city": "B<", "days": 3}
        written = written_calls(format, [{"name": "f", "arguments": arguments}])
        assert written == WRITTEN[parser]
        return
    replies = [reply for reply in REPLIES if reply.parser == parser and reply.calls]
    functions = [[{"name": n, "arguments": each} for n, each in reply.calls] for reply in replies]
    pairs = zip(functions, replies, strict=True)
    assert any(written_calls(format, each) in reply.written for each, reply in pairs)


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_calls_are_read_as_they_are_written(parser: str) -> None:
    arguments: dict[str, Any] = {"text": 'a {"b"}\n</x>', "count": 3, "flag": True, "none": None}
    arguments |= {"list": ["a", {"my-key": [1.5, "b"], "a b": False}], "object": {}}
    types = {"text": "string", "count": "integer", "list": "array", "object": "object"}
    properties = {key: {"type": kind} for key, kind in types.items()}
    properties |= {"flag": {"type": "boolean"}, "none": {"type": "null"}}
    tool = {"name": "f-1", "parameters": {"type": "object", "properties": properties}}
    calls = [{"name": "f-1", "arguments": each} for each in (arguments, {})]
    calls = calls[:1] if parser == "harmony" else calls
    format = format_of(parser)
    reply = MarkedReplyParser(
        format, format.initial_state, [{"type": "function", "function": tool}]
    )
    found = read_with(reply, [*written_calls(CALL_FORMATS[parser], calls)])
    assert named(found.calls) == [(each["name"], each["arguments"]) for each in calls]
    assert not found.text.strip()


STRING = {"type": "string"}
OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}
POINTS = {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("schema", "written", "expected"),
    [
        (OPTIONAL, "10", "10"),
        (OPTIONAL, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "integer"]}, "10", 10),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "number"]}, "10", 10),
        ({"enum": ["true", "false"]}, "true", "true"),
        ({"const": "1"}, "1", "1"),
        ({"allOf": [{"oneOf": [STRING]}]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, " ", []),
        ({"type": ["object", "null"]}, "", {}),
        ({"anyOf": [{"type": "null"}, POINTS]}, "<item><x>1</x></item>", [{"x": "1"}]),
        ({"type": "object", "additionalProperties": STRING}, "<item>1</item>", {"item": "1"}),
        ({}, "10", 10),
        (True, "NaN", "NaN"),
        ({"type": "number"}, "-1e999", "-1e999"),
    ],
)
def test_minimaxs_arguments_have_the_schemas_types(
    schema: Any, written: str, expected: object
) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    text = f'<tool_call><invoke name="f"><a>{written}</a></invoke></tool_call>'
    tools = [{"type": "function", "function": tool}]
    for size in (1, 1000):
        reply = MarkedReplyParser(format_of("minimax_m3"), ReplyState.NORMAL, tools)
        marked = text.replace("<", TAG + "<")
        part = read_with(reply, [marked[at : at + size] for at in range(0, len(marked), size)])
        (call,) = part.calls
        assert json.loads(call.arguments) == {"a": expected}
