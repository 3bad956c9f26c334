"""Parts of grammars of calls whose arguments are not JSON: the arguments that a schema names, its
alternatives, and the text that it allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import regex

from router.errors import InvalidRequest
from router.schemas.conversation import FunctionDefinition, TextFunction
from router.schemas.structured import check_grammar_size
from router.schemas.value_schema import with_alternatives
from router.tokens.parsing.calls import CallFormat, resolved
from router.tokens.parsing.lark_parts import ControlTokens, function_json, within_slashes
from shared.bounded_schema import BOUNDS

MAX_OTHERS = 16
"""Max number of arguments that the schema does not name."""
TEXT_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
_NOT_SUPPORTED = (
    "patternProperties propertyNames unevaluatedProperties minProperties maxProperties"
    " dependentRequired dependentSchemas dependencies not if".split()
)
_LOOKS_AROUND = regex.compile(r"\\[1-9]|\(\?(?:[=!]|<[=!])")
_MAX_ALTERNATIVES = 64
COMBINED = ("allOf", "anyOf", "oneOf")
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/"
"""Any number of bounded length. In JSON schemas, bounded numbers have no exponents."""
_NOT_ANY = {*BOUNDS, "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "not", "if"}
_DATE, _TIME = (
    r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    (
        r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]{1,9})?([Zz]|[+-][0-2][0-9]:[0-5][0-9])"
    ),
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt ]{_TIME}",
    "duration": r"P([0-9]+W|([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+S)?)?)",
    "email": rf"[A-Za-z0-9_+%-]+(\.[A-Za-z0-9_+%-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9A-Fa-f:]{2,39}",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]+",
}


class Members(NamedTuple):
    """The members of an object: their schemas by name, those that are required, and the schema of
    others."""

    properties: dict[str, Any]
    required: set[str]
    others: Any  # False: there are none


class CallRules:
    """The rules of a call of ``function`` in ``format``; their names begin with ``rule``."""

    def __init__(
        self, rule: str, format: CallFormat, function: FunctionDefinition, tokens: ControlTokens
    ) -> None:
        self._rule, self._format, self._template = rule, format, format.template
        self._function, self._tokens = function, tokens
        self._rules: list[str] = []
        self._num_chars = self._num_counted = 0  # of the rules so far, and how many these are
        self._texts: dict[str, str] = {}

    def _members(self, schema: Mapping[str, Any]) -> Members:
        properties: dict[str, Any] = dict(schema.get("properties") or {})
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        others = schema.get("additionalProperties", "properties" not in schema)
        for name in required:
            properties.setdefault(name, others if isinstance(others, dict) else {})
        if self._function.parameters is None or isinstance(self._function, TextFunction):
            others = False
        return Members(properties, set(required), others)

    def _plain(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema of a value without references, except recursive ones."""
        root = self._function.parameters or {}
        own = {key: value for key, value in root.items() if key not in COMBINED}
        plain: dict[str, Any] = resolved({**own, "properties": {"value": schema}})
        return dict(plain["properties"]["value"])

    def _json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for JSON that is valid under ``schema``."""
        root: Mapping[str, Any] = self._function.parameters or {}
        shared: dict[str, Any] = {}
        if '"$ref"' in json.dumps(schema):  # each of many arguments may refer to large ones
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        rule = f"{self._rule}_json{len(self._rules)}"
        ways = [_NUMBER] if allows_any_number(schema) else []
        if schema.get("type") != "number" or not ways:
            ways.append(function_json({**shared, **schema}, self._function))
        self._rules.append(f"{rule}: {' | '.join(ways)}")
        self._check_size()
        return rule

    def _check_size(self) -> None:
        """Raise `InvalidRequest` for rules larger than a grammar may be, before all are written."""
        self._num_chars += sum(map(len, self._rules[self._num_counted :]))
        self._num_counted = len(self._rules)
        check_grammar_size(self._num_chars, "tools")

    def _terminal(
        self, name: str | None, schema: Mapping[str, Any], excluded: Sequence[str]
    ) -> str:
        """Return a terminal for text that ``schema`` allows and that none of the expressions
        ``excluded`` matches."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        parts = [f"/(?s:.{{{least},{most}}})/" if least or most != "" else "/(?s:.*)/"]
        pattern, kind = schema.get("pattern"), schema.get("format")
        if isinstance(pattern, str):
            parts.append(f"/{self._anchored(name, pattern)}/")
        if isinstance(kind, str) and kind in _TEXT_FORMATS:
            parts.append(f"/{within_slashes(_TEXT_FORMATS[kind])}/")
        elif isinstance(kind, str) and self._function.strict:
            raise self._invalid(name, f"the format {kind!r}")
        text = " & ".join([*parts, *(f"~/{each}/" for each in excluded)])
        if text not in self._texts:
            self._texts[text] = f"{self._rule.upper()}_TEXT{len(self._texts)}"
            self._rules.append(f"{self._texts[text]}: {text}")
        return self._texts[text]

    def _anchored(self, name: str | None, pattern: str) -> str:
        """Return the expression for a whole text in which ``pattern`` is found."""
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise self._invalid(name, f"the pattern {pattern[:100]!r} ({error})") from None
        if _LOOKS_AROUND.search(pattern):
            raise self._invalid(name, f"the pattern {pattern[:100]!r}, which looks around,")
        start = "" if pattern.startswith("^") else "(?s:.*)"
        ends = pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern.removeprefix("^")
        inner = inner[:-1] if ends else inner
        return within_slashes(f"{start}({inner}){'' if ends else '(?s:.*)'}")

    def _invalid(self, name: str | None, what: str) -> InvalidRequest:
        tool = self._function.name
        where = f" of the argument '{name}'" if name else ""
        return InvalidRequest(
            f"The tool '{tool}' cannot be enforced: {what}{where} is not supported.", param="tools"
        )


def variants(function: FunctionDefinition) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of ``function``, for each alternative at their root. Raises
    `InvalidRequest`."""
    root = resolved(function.parameters or {"type": "object", "properties": {}})
    for keyword in _NOT_SUPPORTED:
        if function.strict and any(keyword in each for each in with_alternatives(root)):
            raise InvalidRequest(
                f"The tool '{function.name}' cannot be enforced: '{keyword}' is not supported at "
                "the root of its parameters in the model's format of calls.",
                param="tools",
            )
    yield from alternatives(root)


def alternatives(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield schemas without combinations at their root: the first of them, if combinations of
    combinations have very many."""
    return islice(_alternatives(schema), _MAX_ALTERNATIVES)


def _alternatives(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for keyword in COMBINED:
        others = schema.get(keyword)
        if not isinstance(others, list):
            continue
        rest = {key: value for key, value in schema.items() if key != keyword}
        parts = [each for each in others if isinstance(each, dict)]
        if keyword == "allOf":
            for each in parts:
                rest = _both(rest, each)
            yield from _alternatives(rest)
        else:
            for each in parts[:MAX_OTHERS]:
                yield from _alternatives(_both(rest, each))
        return
    yield schema


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of what both schemas allow."""
    out = {**one, **other}
    for key in ("properties", "$defs", "definitions"):
        if parts := [each[key] for each in (one, other) if isinstance(each.get(key), dict)]:
            out[key] = {name: schema for part in parts for name, schema in part.items()}
    lists = [each["required"] for each in (one, other) if each.get("required")]
    if lists and all(isinstance(each, list) for each in lists):
        out["required"] = list(dict.fromkeys(name for each in lists for name in each))
    return out


def allows_any_number(schema: Mapping[str, Any]) -> bool:
    """Return whether ``schema`` allows numbers and limits them in no way."""
    named = schema.get("type")
    kinds = named if isinstance(named, list) else [named]
    return "number" in kinds and not _NOT_ANY & schema.keys()


def choices(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that ``schema`` allows, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return list(schema["enum"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        others = schema.get(keyword)
        if not isinstance(others, list) or not others:
            continue
        found = [choices(each) if isinstance(each, dict) else None for each in others]
        null = [None]
        for number, each in enumerate(others):
            if isinstance(each, dict) and each.get("type") == "null":
                found[number] = null
        if keyword == "allOf":
            return next((each for each in found if each is not None), None)
        if all(each is not None for each in found):
            return [value for each in found for value in each or ()]
    return None
