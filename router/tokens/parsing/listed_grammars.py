"""Grammars of calls that list their arguments in brackets, without quotes around their names, as
`router.tokens.parsing.json_reader` reads them: the Gemma family's and Python's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from router.schemas.conversation import FunctionDefinition, TextFunction
from router.schemas.value_schema import ValueSchema
from router.tokens.parsing.call_rules import (
    MAX_OTHERS,
    TEXT_KEYWORDS,
    CallRules,
    allows_any_number,
    alternatives,
    choices,
    variants,
)
from router.tokens.parsing.calls import PLAIN_NAME, CallFormat, written_key, written_value
from router.tokens.parsing.input_grammars import input_lark
from router.tokens.parsing.json_reader import JSON_STYLE
from router.tokens.parsing.lark_parts import ControlTokens, escaped_regex
from shared.bounded_schema import BOUNDS

_MAX_LISTED = 16
_OTHER_NAME = r"/[A-Za-z_$@][A-Za-z0-9_$@.-]{0,63}/"
_ANNOTATIONS = {"type", "title", "description", "default", "examples", "$defs", "definitions"}
_OF_OBJECTS = _ANNOTATIONS | {"properties", "required", "additionalProperties"}
_OF_ARRAYS = _ANNOTATIONS | {"items", "minItems", "maxItems"}
_EXPECTED = {"properties": dict, "required": list, "minItems": int, "maxItems": int}
_KINDS = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})


class ListedCall(CallRules):
    """The rules of the arguments of a call."""

    def __init__(
        self, rule: str, format: CallFormat, function: FunctionDefinition, tokens: ControlTokens
    ) -> None:
        super().__init__(rule, format, function, tokens)
        self._quote = format.style.quotes[0]
        self._python = format.style.python
        self._is_json = format.style is JSON_STYLE
        if self._is_json:
            self._template = self._template._replace(argument="{key}: ", separator=", ")
        self._separator = tokens.to_lark(self._template.separator)
        self._values: dict[str, str] = {}  # rules of values, by schema: it may be recursive

    def rules(self) -> list[str]:
        """Return the rules, the first of which is for the arguments. Raises `InvalidRequest` for
        keywords that cannot be enforced."""
        ways = []
        for number, parameters in enumerate(variants(self._function)):
            self._check_size()
            names = self._members(parameters).properties
            if self._is_json:
                ways.append(f'"{{" {self._object(f"{self._rule}v{number}_", parameters)} "}}"')
            elif self._python and not all(map(PLAIN_NAME.fullmatch, names)):
                ways.append(f'"**" {self._json({"type": "object", **parameters})}')
            else:
                ways.append(self._object(f"{self._rule}v{number}_", parameters))
        return [f"{self._rule}_arguments: {' | '.join(ways)}", *self._rules]

    def _object(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Return a rule for the members of an object. In those named ``first{n}``, all members
        before the n-th are left out; in those named ``more{n}``, one is not."""
        properties, required, others = self._members(schema)
        for number, (name, value) in enumerate(properties.items()):
            key = self._template.argument.replace("{key}", self._key(name))
            member = (
                f"{self._tokens.to_lark(key)} {self._value(name, value)} {rule}more{number + 1}"
            )
            for place, before in (("first", ""), ("more", self._separator)):
                without = "" if name in required else f" | {rule}{place}{number + 1}"
                self._rules.append(f"{rule}{place}{number}: {before} {member}{without}")
        first = more = '""'
        if others is not False:
            listed = "|".join(map(escaped_regex, properties))
            excluded = f" & ~/({listed})/" if listed else ""
            self._rules.append(f"{rule.upper()}NAME: {_OTHER_NAME}{excluded}")
            after = self._tokens.to_lark(self._template.argument.removeprefix("{key}"))
            self._rules.append(
                f"{rule}other: {rule.upper()}NAME {after} {self._value(None, others)}"
            )
            more = f"({self._separator} {rule}other){{0,{MAX_OTHERS}}}"
            first = f"({rule}other {more})?"
        self._rules += [f"{rule}{place}{len(properties)}: {end}"
                        for place, end in (("first", first), ("more", more))]  # fmt: skip
        return f"{rule}first0"

    def _key(self, name: str) -> str:
        if self._is_json:
            return json.dumps(name, ensure_ascii=False)
        return written_key(self._format, name)

    # -- values --------------------------------------------------------------------

    def _value(self, name: str | None, schema: Any) -> str:
        """Return the rule of a value that ``schema`` allows, of the argument ``name``."""
        key = json.dumps(schema)
        if key not in self._values:
            rule = self._values[key] = f"{self._rule}_value{len(self._values)}"
            if isinstance(self._function, TextFunction):
                written = self._input(self._function)
            else:
                own = schema if isinstance(schema, dict) else {}
                if self._is_json:
                    written = self._json(own)
                else:
                    written = (
                        self._python_value(own) if self._python else self._own(rule, name, own)
                    )
            self._rules.append(f"{rule}: {written}")
        return self._values[key]

    def _python_value(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for JSON, or Python's names of the values without a name there."""
        plain = self._plain(schema)
        types = frozenset() if choices(plain) is not None else ValueSchema(plain).types
        literals = {"boolean": ' | "True" | "False"', "null": ' | "None"'}
        return self._json(schema) + "".join(literals.get(each, "") for each in sorted(types))

    def _own(self, rule: str, name: str | None, schema: Mapping[str, Any]) -> str:
        """Return an expression for a value in the model's notation."""
        plain = self._plain(schema)
        if (listed := choices(plain)) is not None:
            return " | ".join(
                self._tokens.to_lark(written_value(self._format, each)) for each in listed
            )
        ways = [
            way
            for number, each in enumerate(alternatives(plain))
            for way in self._ways(f"{rule}_{number}_", name, each)
        ]
        return " | ".join(ways or [self._json(schema)])

    def _ways(self, rule: str, name: str | None, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yield expressions for the values of each type that ``schema`` allows."""
        types = ValueSchema(schema).types
        if "$ref" in schema or "not" in schema or "if" in schema or types - _KINDS:
            yield self._json(schema)
        elif not types and any(key in schema for key in TEXT_KEYWORDS):
            yield self._text(name, schema)
        elif not types:
            yield self._any()
        else:
            for kind in sorted(types):
                yield self._of_kind(kind, rule, name, schema)

    def _of_kind(self, kind: str, rule: str, name: str | None, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self._text(name, schema)
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "array" if _has_only(schema, _OF_ARRAYS):
                return self._array(name, schema)
            case "object" if _has_only(schema, _OF_OBJECTS):
                return f'"{{" {self._object(rule, schema)} "}}"'
            case "array" | "object":
                return self._json({**schema, "type": kind})
        limits = {each: schema[each] for each in BOUNDS if each in schema}
        return self._json({"type": kind, **limits})

    def _array(self, name: str | None, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self._value(name, schema.get("items", {}))
        repeated = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f"{item} ({self._separator} {item}){repeated}"
        return f'"[" {items if least else f"({items})?"} "]"'

    def _text(self, name: str | None, schema: Mapping[str, Any]) -> str:
        quote = self._tokens.to_lark(self._quote)
        if self._tokens.occur_in(self._quote):
            return f"{quote} {self._terminal(name, schema, [])} {quote}"
        text = self._terminal(name, schema, [f"(?s:.*{escaped_regex(self._quote)}.*)"])
        rule = f"{text.lower()}_ended"
        line = f"{rule}[suffix={json.dumps(self._quote)}]: {text}"
        if line not in self._rules:
            self._rules.append(line)
        return f"{quote} {rule}"

    def _any(self) -> str:
        """Return the rule of any value."""
        if "any" not in self._values:
            rule = self._values["any"] = f"{self._rule}_any"
            listed = f'"[" ({rule} ({self._separator} {rule})*)? "]"'
            member = f'{_OTHER_NAME} ":" {rule}'
            members = f'"{{" ({member} ({self._separator} {member})*)? "}}"'
            number = self._json({"type": "number"})
            ways = [self._text(None, {}), number, '"true" | "false" | "null"', listed, members]
            self._rules.append(f"{rule}: {' | '.join(ways)}")
        return self._values["any"]

    def _input(self, function: TextFunction) -> str:
        """Return an expression for the text of a tool that takes no other argument."""
        text, quote = function.input_grammar, self._tokens.to_lark(self._quote)
        if self._python:
            return f"{quote} {input_lark(text, quoted=True)} {quote}"
        if self._tokens.occur_in(self._quote):
            return f"{quote} {input_lark(text, quoted=False)} {quote}"
        return f"{quote} {input_lark(text, quoted=False, end=self._quote)}"


def has_free_numbers(function: FunctionDefinition) -> bool:
    """Return whether arguments in JSON may be listed one by one, because some are numbers without
    limits. Each takes some hundred bytes of the grammar."""
    schema = function.parameters or {}
    return (
        "additionalProperties" not in schema
        and len(schema.get("properties", ())) <= _MAX_LISTED
        and _has_only(schema, _OF_OBJECTS)
        and set(schema.get("required", ())) <= schema.get("properties", {}).keys()
        and any(
            isinstance(each, dict) and allows_any_number(each)
            for each in schema.get("properties", {}).values()
        )
    )


def _has_only(schema: Mapping[str, Any], keywords: set[str]) -> bool:
    """Return whether a schema has only ``keywords``, with the values that they should have."""
    given = (isinstance(schema.get(each, kind()), kind) for each, kind in _EXPECTED.items())
    return (
        schema.keys() <= keywords
        and all(given)
        and all(isinstance(name, str) for name in schema.get("required", ()))
    )
