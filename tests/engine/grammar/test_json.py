"""JSON answers: their numbers and the whitespace in them have an end, and what a schema names is
possible."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from engine.grammar.compiled import compile_grammar
from shared.wire import Grammar

LONG = "9" * 30
ANY_OBJECT = {"type": "object"}
NUMBER, INTEGER = {"type": "number"}, {"type": "integer"}


def accepts(tokenizer: LLTokenizer, schema: Any, text: str) -> bool:
    grammar = Grammar(kind="json_schema", source=json.dumps(schema))
    matcher = compile_grammar(tokenizer, grammar).initial_matcher.deep_copy()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "around"),
    [
        (NUMBER, "{}"),
        ({"type": ["integer", "null"]}, "{}"),
        ({}, "{}"),
        ({"type": "integer", "minimum": 1}, "{}"),
        ({"allOf": [INTEGER, {"minimum": 1}]}, "{}"),
        ({"type": "array"}, '["x", {{"a": [{}]}}]'),
        ({"type": "array", "prefixItems": [INTEGER]}, "[{}, 5]"),
        (ANY_OBJECT, '{{"a": [1, {{"b": {}}}]}}'),
        (of(a={}), '{{"a": [{}]}}'),
        (of(enum=NUMBER), '{{"enum": {}}}'),
        (of(a={"type": "string"}), '{{"b": {}}}'),
        ({**ANY_OBJECT, "additionalProperties": True}, '{{"a": {}}}'),
        ({**of(a={"$ref": "#/$defs/any"}), "$defs": {"any": NUMBER}}, '{{"a": {}, "b": []}}'),
    ],
)
def test_numbers_that_a_schema_leaves_free_have_an_end(
    tokenizer: LLTokenizer, schema: Any, around: str
) -> None:
    assert accepts(tokenizer, schema, around.format(10**17))
    assert not accepts(tokenizer, schema, around.format(LONG))
    assert not accepts(tokenizer, schema, around.format("1." + LONG))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (NUMBER, "-0.000000001"),
        ({"enum": [10**25, "x"]}, str(10**25)),
        ({"const": 0.25}, "0.25"),
        ({**NUMBER, "minimum": 0.5}, "0.5"),
        ({**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 1e-9}, "0.00000000012"),
        ({"allOf": [NUMBER, {"maximum": 1e-12, "minimum": 1e-13}]}, "0.0000000000002"),
        ({**INTEGER, "minimum": 0, "maximum": 4 * 10**18}, str(3 * 10**18)),
        ({"allOf": [INTEGER, {"minimum": 0, "maximum": 4 * 10**18}]}, str(3 * 10**18)),
        ({"allOf": [INTEGER, {"enum": [10**18, 5]}]}, str(10**18)),
        ({"allOf": [ANY_OBJECT, of(a=INTEGER)]}, '{"a": 5, "b": [1]}'),
        ({**of(a=NUMBER), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b": 1.5}'),
        ({"$ref": "#/definitions/l", "definitions": {"l": of(l={"$ref": "#/definitions/l"})}},
         '{"l": {"l": {}}}'),
        ({**ANY_OBJECT, "patternProperties": {"^x": INTEGER}}, '{"x1": 5, "y": [1, true]}'),
    ],
)  # fmt: skip
def test_what_a_schema_names_is_possible(tokenizer: LLTokenizer, schema: Any, text: str) -> None:
    assert accepts(tokenizer, schema, text)


@pytest.mark.parametrize(
    ("schema", "around"),
    [(ANY_OBJECT, "{}"), ({"type": "array"}, "[{}]"), (of(a={}), '{{"a": {}}}')],
)
def test_members_of_any_object_have_names(tokenizer: LLTokenizer, schema: Any, around: str) -> None:
    for text in ('{"é b": 1}', '{"a": {"b\\"": [{"c": {}}]}}'):
        assert accepts(tokenizer, schema, around.format(text))
    for text in ('{"": 1}', '{"b": 1, "  ": 2}', '{"b": [{"\\n": 1}]}'):
        assert not accepts(tokenizer, schema, around.format(text))
    needed = {**ANY_OBJECT, "required": ["b"]}
    assert accepts(tokenizer, needed, '{"b": 1}') and not accepts(tokenizer, needed, "{}")


@pytest.mark.parametrize("schema", [ANY_OBJECT, of(a={"type": "array", "items": INTEGER})])
def test_whitespace_is_what_a_person_would_write(tokenizer: LLTokenizer, schema: Any) -> None:
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\n    1,\n    2\n  ]\n}'):
        assert accepts(tokenizer, schema, text)
    for space in ("  ", "\t", "\n\t", "\n\n", "\n" + " " * 30, " \n"):
        for text in ('{"a": [$1, 2]}', '{"a": [1,$2]}', '{$"a": [1, 2]}', '{"a":$[1, 2]}'):
            assert not accepts(tokenizer, schema, text.replace("$", space)), space
