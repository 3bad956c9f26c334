from __future__ import annotations

import json
import time
from typing import Any

import pytest

from router.tokens.parsing.calls import JSON, parse_calls
from router.tokens.parsing.syntaxes import syntax_named
from tests.router.tokens.parsing.replies import TOOLS

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
    expected = ("get_weather", '{"city": "Berlin"}', None)
    assert parse_calls(reply, JSON, TOOLS) == [expected] * count


@pytest.mark.parametrize("end", ["", "x", "```", f"{CALL}```"])
def test_whitespace_in_a_fence_takes_linear_time(end: str) -> None:
    started = time.monotonic()
    parse_calls("```" + " \n" * 200_000 + end, JSON, TOOLS)
    assert time.monotonic() - started < 10


def test_only_so_many_values_are_repaired() -> None:
    """The text after each is copied."""
    wrong = CALL.replace('"}', '",}')
    assert len(parse_calls(wrong * 100, JSON, TOOLS)) == 100
    assert parse_calls(wrong * 101, JSON, TOOLS) == []


def test_a_call_of_mistrals_keeps_its_id() -> None:
    syntax = syntax_named("mistral")
    for between, id in (("", None), (" [CALL_ID]a1b2 ", "a1b2"), ("[CALL_ID]", None)):
        (call,) = parse_calls(f'get_weather{between}[ARGS] {{"city": "x"}}', syntax, TOOLS)
        assert call == ("get_weather", '{"city": "x"}', id)


STRING = {"type": "string"}
OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}
POINTS = {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "string"}}}}
TAG = "]<]minimax[>["
"""Before each tag of MiniMax M3."""


@pytest.mark.parametrize(
    ("schema", "written", "read"),
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
def test_minimaxs_arguments_have_the_schemas_types(schema: Any, written: str, read: object) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    text = f'<invoke name="f"><a>{written}</a></invoke>'.replace("<", TAG + "<")
    syntax = syntax_named("minimax_m3")
    (call,) = parse_calls(text, syntax, [{"type": "function", "function": tool}])
    assert json.loads(call.arguments) == {"a": read}
