"""Grammars of arguments between tags: what they allow is what the schema allows, as it is read."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from router.errors import InvalidRequest
from router.schemas.conversation import FunctionDefinition
from router.tokens.parsing.calls import CallTemplate
from router.tokens.parsing.formats import CALL_FORMATS, ReplyState
from router.tokens.parsing.grammars import calls_grammar
from router.tokens.parsing.marked import MarkedReplyParser
from tests.router.tokens.parsing.test_grammars import Checker
from tests.router.tokens.parsing.test_marked import format_of, named, read_with

FORMATS = {
    name: each.template
    for name, each in CALL_FORMATS.items()
    if each.tags and each.template.argument
}
EACH_FORMAT = pytest.mark.parametrize("parser", FORMATS)
STRING, NULL = {"type": "string"}, {"type": "null"}
DEFS = {"S": {"type": "string", "enum": ["red", "blue"]}, "T": STRING}


@pytest.fixture(scope="module")
def checker() -> Checker:
    """Return one for a tokenizer without control tokens."""
    return Checker(markers=())


def written(template: CallTemplate, arguments: dict[str, Any], *, as_text: bool) -> str:
    out = template.before + template.begin.replace("{name}", "f")
    for key, value in arguments.items():
        is_text = isinstance(value, str) and as_text
        opening = template.argument.replace("{is_text}", json.dumps(is_text))
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        out += (opening + text + template.argument_end).replace("{key}", key)
    return out + template.end + template.after


def readings(
    checker: Checker, parser: str, parameters: dict[str, Any], arguments: dict[str, Any]
) -> list[Any]:
    """Return how each way of writing ``arguments`` is read that the grammar allows."""
    function = FunctionDefinition(name="f", strict=True, parameters=parameters)
    template = FORMATS[parser]
    grammar = calls_grammar(CALL_FORMATS[parser], [function], checker.tokens, parallel=False)
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    found = []
    for as_text in (True, False):
        text = written(template, arguments, as_text=as_text)
        if checker.accepts(grammar, text):
            format = format_of(parser)
            reply = MarkedReplyParser(format, format.initial_state, tools, only_calls=True)
            found += named(read_with(reply, [*text]).calls)
    return [arguments for _, arguments in found]


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "$defs": DEFS}


ALLOWED: list[tuple[Any, Any]] = [
    *((schema, "x y") for schema in (
        STRING, {"type": ["string", "null"]}, {"anyOf": [STRING, NULL]}, {"$ref": "#/$defs/T"},
        {"anyOf": [STRING, {"type": "integer"}]}, {"description": "d"},
    )),
    *((schema, "red") for schema in (
        {"$ref": "#/$defs/S"}, {"allOf": [{"$ref": "#/$defs/S"}]}, {"const": "red"},
        {"anyOf": [{"$ref": "#/$defs/S"}, NULL]}, {"enum": ["red", None]},
        {"oneOf": [{"const": "red"}, {"const": "blue"}]}, {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "string", "minLength": 3, "maxLength": 3},
    )),
    ({"enum": ["red", None]}, None), ({"type": ["string", "null"]}, None),
    ({"type": "number"}, 1e-07), ({"type": ["number", "null"]}, 2e20),
    ({"type": "string", "format": "date"}, "2026-02-28"), ({"type": "integer"}, 5),
    ({"type": "array", "items": STRING}, ["a", "b"]), ({"type": "boolean"}, True),
]  # fmt: skip
REFUSED: list[tuple[Any, Any]] = [
    ({"type": "string", "pattern": "^[a-z]{2,4}$"}, "ABC9"),
    ({"type": "string", "pattern": "[0-9]"}, "none"),
    ({"type": "string", "minLength": 3}, "a"),
    ({"type": "string", "maxLength": 3}, "abcdef"),
    ({"type": "string", "format": "date"}, "yesterday"),
    ({"type": "string", "const": "k"}, "z"),
    ({"enum": ["red", None]}, "green"),
    ({"anyOf": [{"$ref": "#/$defs/S"}, NULL]}, "green"),
    ({"type": "integer"}, "x"),
]


@EACH_FORMAT
@pytest.mark.parametrize(("schema", "value"), ALLOWED)
def test_what_the_schema_allows_is_read_as_it_was_meant(
    checker: Checker, parser: str, schema: Any, value: Any
) -> None:
    found = readings(checker, parser, of(city=schema), {"city": value})
    assert found and all(each == {"city": value} for each in found)


@EACH_FORMAT
@pytest.mark.parametrize(("schema", "value"), REFUSED)
def test_what_the_schema_forbids_is_refused(
    checker: Checker, parser: str, schema: Any, value: Any
) -> None:
    assert {"city": value} not in readings(checker, parser, of(city=schema), {"city": value})


@EACH_FORMAT
@pytest.mark.parametrize("between", ["", "\n"])
def test_a_closing_tag_may_be_part_of_a_value(checker: Checker, parser: str, between: str) -> None:
    close = FORMATS[parser].argument_end.strip().replace("{key}", "city")
    arguments = {"city": f"a{between}{close}{between}b", "t": "end"}
    assert readings(checker, parser, of(city=STRING, t=STRING), arguments) == [arguments]


@EACH_FORMAT
def test_a_value_with_what_ends_the_calls_is_read_as_a_whole_or_refused(
    checker: Checker, parser: str
) -> None:
    close = FORMATS[parser].argument_end.strip().replace("{key}", "city")
    arguments = {"city": f"a{close}\n{CALL_FORMATS[parser].end}b"}
    found = readings(checker, parser, of(city=STRING), arguments)
    assert all(each == arguments for each in found)


@EACH_FORMAT
def test_arguments_that_are_not_named_are_free_if_the_schema_says_so(
    checker: Checker, parser: str
) -> None:
    for named_here in ({}, {"city": STRING}):
        arguments = {**dict.fromkeys(named_here, "x"), "zz": 1}
        free = {**of(**named_here), "additionalProperties": True}
        found = readings(checker, parser, free, arguments)
        assert found and all(each == arguments for each in found)
        assert not readings(checker, parser, of(**named_here), arguments)
    missing = {"type": "object", "properties": {}, "required": ["zz"]}
    assert readings(checker, parser, missing, {"zz": "x"}) and not readings(
        checker, parser, missing, {}
    )


@EACH_FORMAT
def test_alternatives_at_the_root_are_allowed_one_by_one(checker: Checker, parser: str) -> None:
    either = {"anyOf": [of(city=STRING), {"$ref": "#/$defs/B"}], "$defs": {"B": of(t=STRING)}}
    for arguments in ({"city": "x"}, {"t": "x"}):
        assert readings(checker, parser, either, arguments) == [arguments]
    assert not readings(checker, parser, either, {})


@pytest.mark.parametrize("parser", ["qwen3_coder", "gemma4", "pythonic", "json_tools"])
def test_definitions_that_many_arguments_refer_to_are_bounded(
    checker: Checker, parser: str
) -> None:
    named = {f"p{number}": {"type": "string", "description": "x" * 40} for number in range(1200)}
    definitions = {"Large": {"type": "object", "properties": named}}
    for schema in ({"type": "array", "items": {"$ref": "#/$defs/Large"}}, {"type": "integer"}):
        properties = {f"a{number}": schema for number in range(800)} | {"n": {"type": "number"}}
        parameters = {"type": "object", "properties": properties, "$defs": definitions}
        function = FunctionDefinition(name="f", parameters=parameters)
        started = time.process_time()
        with contextlib.suppress(InvalidRequest):
            calls_grammar(CALL_FORMATS[parser], [function], checker.tokens, parallel=False)
        assert time.process_time() - started < 2


@pytest.mark.parametrize("parser", ["qwen3_coder", "gemma4", "pythonic", "json_tools"])
def test_many_arguments_with_many_alternatives_take_little_time(
    checker: Checker, parser: str
) -> None:
    properties = {f"a{number}": STRING for number in range(6000)}
    parameters = {"type": "object", "properties": properties, "required": [*properties][:3000]}
    function = FunctionDefinition(name="f", parameters={**parameters, "anyOf": [{}] * 64})
    started = time.process_time()
    with contextlib.suppress(InvalidRequest):
        calls_grammar(CALL_FORMATS[parser], [function], checker.tokens, parallel=False)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("parser", ["qwen3_coder", "gemma4", "pythonic", "json_tools"])
def test_references_that_stand_for_billions_of_schemas_take_no_time(
    checker: Checker, parser: str
) -> None:
    definitions: dict[str, Any] = {"d9": STRING}
    for number in range(9):
        definitions[f"d{number}"] = {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 20}
    properties = {f"a{number}": {"$ref": "#/$defs/d0"} for number in range(20)}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    function = FunctionDefinition(name="f", parameters=parameters)
    started = time.process_time()
    with contextlib.suppress(InvalidRequest):
        calls_grammar(CALL_FORMATS[parser], [function], checker.tokens, parallel=False)
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    MarkedReplyParser(format_of(parser), ReplyState.NORMAL, tools)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("parameters", "named_in_error"),
    [
        (of(city={"type": "string", "pattern": "("}), "pattern"),
        (of(city={"type": "string", "pattern": "(?=x)y"}), "pattern"),
        (of(city={"type": "string", "format": "rhyme"}), "rhyme"),
        ({**of(city=STRING), "minProperties": 2}, "minProperties"),
        ({**of(city=STRING), "not": {"required": ["city"]}}, "not"),
    ],
)
def test_what_cannot_be_enforced_is_an_error(
    checker: Checker, parameters: dict[str, Any], named_in_error: str
) -> None:
    strict = FunctionDefinition(name="lookup", strict=True, parameters=parameters)
    with pytest.raises(InvalidRequest, match="lookup") as error:
        calls_grammar(CALL_FORMATS["qwen3_coder"], [strict], checker.tokens, parallel=False)
    assert named_in_error in str(error.value)
