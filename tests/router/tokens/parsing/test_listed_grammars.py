"""Grammars of the Gemma family's and Python's calls, and of all formats: what they allow is read as
what the schema allows."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy
import pytest
from llguidance import LLMatcher

from router.schemas.conversation import FunctionDefinition
from router.tokens.parsing.calls import written_calls
from router.tokens.parsing.formats import CALL_FORMATS
from router.tokens.parsing.grammars import calls_grammar
from router.tokens.parsing.marked import MarkedReplyParser
from tests.router.tokens.parsing.test_grammars import Checker
from tests.router.tokens.parsing.test_marked import format_of, named, read_with
from tests.router.tokens.parsing.test_tagged_grammars import ALLOWED, NULL, REFUSED, STRING, of
from tests.router.tokens.parsing.writers import pythonic

QUOTES = {"gemma4": '<|"|>', "function_gemma": "<escape>"}
EACH_FORMAT = pytest.mark.parametrize("parser", [*QUOTES, "pythonic"])
INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
TREE = {
    "type": "object",
    "properties": {"v": INTEGER, **{key: {"$ref": "#/$defs/Tree"} for key in ("sub", *"abcdefgh")}},
}


@pytest.fixture(scope="module", params=[(), tuple(QUOTES.values())], ids=["text", "control"])
def checker(request: pytest.FixtureRequest) -> Checker:
    """Return one for a tokenizer with and without control tokens around text."""
    return Checker(markers=request.param)


def written(parser: str, arguments: dict[str, Any]) -> list[str]:
    """Return the ways of writing a call."""
    if parser == "pythonic":
        flat = [lambda value: json.dumps(value, ensure_ascii=False), repr]
        found = [pythonic(each)([("f", arguments)]) for each in flat]
        return [*found, f"<|tool_call_start|>[f(**{json.dumps(arguments)})]<|tool_call_end|>"]
    return [written_calls(CALL_FORMATS[parser], [{"name": "f", "arguments": arguments}])]


def grammar_of(parser: str, parameters: Any, checker: Checker) -> str:
    function = FunctionDefinition(name="f", strict=True, parameters=parameters)
    return calls_grammar(CALL_FORMATS[parser], [function], checker.tokens, parallel=False)


def arguments_in(parser: str, parameters: Any, text: str) -> Any:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    format = format_of(parser)
    reply = MarkedReplyParser(format, format.initial_state, tools, only_calls=True)
    ((name, arguments),) = named(read_with(reply, [*text]).calls)
    assert name == "f"
    return arguments


def readings(checker: Checker, parser: str, parameters: Any, arguments: Any) -> list[Any]:
    """Return how each way of writing ``arguments`` is read that the grammar allows."""
    grammar = grammar_of(parser, parameters, checker)
    texts = [text for text in written(parser, arguments) if checker.accepts(grammar, text)]
    return [arguments_in(parser, parameters, text) for text in texts]


NESTED: list[tuple[Any, Any]] = [
    ({"type": "array", "items": STRING, "maxItems": 2}, ["a", 'b"}']),
    ({"type": "array", "items": STRING}, []),
    ({"type": "array"}, [1, "x", [True, {"k": None}]]),
    ({"type": "array", "items": of(a=INTEGER)}, [{"a": 1}, {"a": 2}]),
    (of(a=of(b=STRING, c={"type": "boolean"})), {"a": {"b": "x\ny", "c": False}}),
    ({"type": "object"}, {"k": [1.5, "x"], "m": {}}),
    ({"type": "object", "additionalProperties": INTEGER}, {"k": 5}),
    ({"anyOf": [{"type": "array", "items": STRING}, NULL]}, ["x"]),
    ({"anyOf": [{"type": "array", "items": STRING}, NULL]}, None),
    ({"enum": [["a"], {"k": "v"}]}, {"k": "v"}),
    ({"$ref": "#/$defs/Tree"}, {"v": 1, "sub": {"v": 2, "h": {"v": 3, "a": {}}}}),
    ({"minLength": 2, "x-shown": True}, "ab"), ({"x-shown": True}, "a"), ({}, 5), ({}, {"k": "v"}),
]  # fmt: skip


def with_tree(**properties: Any) -> dict[str, Any]:
    whole = of(**properties)
    return {**whole, "$defs": {**whole["$defs"], "Tree": TREE}}


@EACH_FORMAT
@pytest.mark.parametrize(("schema", "value"), [*ALLOWED, *NESTED])
def test_what_the_schema_allows_is_read_as_it_was_meant(
    checker: Checker, parser: str, schema: Any, value: Any
) -> None:
    parameters = with_tree(city=schema, days=INTEGER)
    arguments = {"city": value, "days": 3}
    found = readings(checker, parser, parameters, arguments)
    assert found and all(each == arguments for each in found)


@EACH_FORMAT
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        *REFUSED,
        ({"type": "array", "items": STRING, "maxItems": 2}, ["a", "b", "c"]),
        ({"type": "array", "items": STRING, "minItems": 2}, ["a"]),
        ({"type": "array", "items": INTEGER}, ["a"]),
        (of(a=INTEGER), {"a": 1, "b": 2}),
        (of(a=INTEGER), {}),
        (of(a={"type": "string", "maxLength": 2}), {"a": "abc"}),
        ({**INTEGER, "minimum": 3}, 2),
        (NUMBER, int("9" * 30)),
        ({"type": "array"}, [int("9" * 30)]),
    ],
)
def test_what_the_schema_forbids_is_refused(
    checker: Checker, parser: str, schema: Any, value: Any
) -> None:
    assert not readings(checker, parser, of(city=schema), {"city": value})


@EACH_FORMAT
def test_arguments_may_be_left_out_or_free_if_the_schema_says_so(
    checker: Checker, parser: str
) -> None:
    some: dict[str, Any] = {**of(a=INTEGER, b=STRING, c=INTEGER), "required": ["b"]}
    allowed: list[dict[str, Any]] = [{"b": "x"}, {"a": 1, "b": "x"}, {"b": "x", "c": 2}]
    for arguments in allowed:
        assert arguments in readings(checker, parser, some, arguments)
    refused: list[dict[str, Any]] = [{}, {"a": 1, "c": 2}, {"b": "x", "d": 1}]
    for arguments in refused:
        assert not readings(checker, parser, some, arguments)
    free = {**some, "additionalProperties": True}
    assert {"b": "x", "d": 1} in readings(checker, parser, free, {"b": "x", "d": 1})
    either = {"anyOf": [of(a=INTEGER), of(b=INTEGER)]}
    assert {"b": 1} in readings(checker, parser, either, {"b": 1})
    assert not readings(checker, parser, either, {})


@EACH_FORMAT
@pytest.mark.parametrize("key", ["my-key", "@type", "$ref", "my key", "a:b", "é", "x{y}", "a=b"])
def test_any_name_of_an_argument_can_be_written(checker: Checker, parser: str, key: str) -> None:
    parameters = of(**{key: STRING, "n": INTEGER})
    arguments = {key: "x", "n": 1}
    assert arguments in readings(checker, parser, parameters, arguments)


SAMPLED = of(
    t={"type": "string", "maxLength": 6},
    e={"enum": ["red", 5, None]},
    n={"anyOf": [{"type": "string", "maxLength": 3}, NULL]},
    a={"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    o=of(x=INTEGER, y={"type": "string", "pattern": "^[a-c]{1,3}$"}),
    b={"type": "boolean"},
) | {"required": ["t", "o"]}


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_whatever_a_grammar_allows_is_read_and_valid(checker: Checker, parser: str) -> None:
    grammar = grammar_of(parser, SAMPLED, checker)
    for seed in range(8):
        text = sampled(checker, grammar, random.Random(f"{parser} {seed}"))
        jsonschema.validate(arguments_in(parser, SAMPLED, text), SAMPLED)


def sampled(checker: Checker, grammar: str, draw: random.Random) -> str:
    """Return a random text that ``grammar`` allows."""
    matcher = LLMatcher(checker.guide, LLMatcher.grammar_from_lark(grammar), log_level=0)
    tokens: list[int] = []
    while not matcher.is_stopped():
        assert len(tokens) < 2000
        mask = numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8)
        allowed = numpy.flatnonzero(numpy.unpackbits(mask, bitorder="little"))
        token = int(draw.choice(allowed))
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return str(checker.tokenizer.decode(tokens[:-1], skip_special_tokens=False))
