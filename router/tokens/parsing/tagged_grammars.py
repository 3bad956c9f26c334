"""Grammars of calls with each argument between tags, as `router.tokens.parsing.tagged` reads them.

A value is text up to a closing tag that another tag of the call follows. The grammar therefore
matches the closing tag together with the start of what follows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from router.errors import InvalidRequest
from router.schemas.conversation import FunctionDefinition, TextFunction
from router.schemas.value_schema import ValueSchema, with_alternatives
from router.tokens.parsing.calls import CallFormat, CallTemplate, resolved
from router.tokens.parsing.formats import CALL_FORMATS
from router.tokens.parsing.input_grammars import input_lark
from router.tokens.parsing.lark_parts import ControlTokens, escaped_regex, function_json

_MAX_OTHERS = 16
"""Max number of arguments that the schema does not name."""
_SPACES = r"\s{0,8}"
_OTHER_KEY = r"/[^<>\"'\s\x00-\x1f]{1,64}/"
_JSON_TEXT = r'/\s*"([^"\\]|\\.)*"\s*/'
"""Not written as text: quotes around a value would become part of it."""
_NOT_SUPPORTED = (
    "patternProperties propertyNames unevaluatedProperties minProperties maxProperties"
    " dependentRequired dependentSchemas dependencies not if".split()
)
_LOOKS_AROUND = regex.compile(r"\\[1-9]|\(\?(?:[=!]|<[=!])")
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


class _Value(NamedTuple):
    """How a value is written: as text, one of some texts, or JSON."""

    is_text: bool
    text: str = ""  # a terminal
    written: str = ""  # an expression for the whole value
    has_end: bool = False  # whether that includes the text after the value


class TaggedCall:
    """The rules of a call of ``function``, whose names begin with ``rule``, after its head."""

    def __init__(
        self,
        rule: str,
        template: CallTemplate,
        function: FunctionDefinition,
        tokens: ControlTokens,
    ) -> None:
        format = _format_of(template)
        assert format.tags is not None
        self._rule, self._template, self._function = rule, template, function
        self._tokens, self._tags = tokens, format.tags
        self._end = format.tags.end or format.end
        self._stop = format.end if format.tags.end else ""
        self._prefix = template.argument.partition("{key}")[0]
        self._after_end = template.end.partition(self._end)[2]
        self._close = template.argument_end.rstrip()
        self._rules: list[str] = []
        self._texts: dict[str, str] = {}
        self._ended: dict[tuple[str, str], str] = {}
        self._used: set[str] = set()  # rules for what follows a value
        closing = [self._close, self._prefix, self._end]
        self._looks_ahead = not any(map(tokens.occur_in, closing))

    def rules(self) -> list[str]:
        """Return the rules, the first of which is for everything after the head. Raises
        `InvalidRequest` for keywords that cannot be enforced."""
        variants = list(_variants(self._function))
        for number, parameters in enumerate(variants):
            self._add_variant(f"{self._rule}v{number}", parameters)
        starts = (f"{self._rule}v{number}_more0" for number in range(len(variants)))
        return [f"{self._rule}_more: {' | '.join(starts)}", *self._rules]

    def _add_variant(self, rule: str, parameters: Mapping[str, Any]) -> None:
        """Add rules for calls with ``parameters``. In those named ``more{n}``, the prefix of an
        argument from the n-th on follows, or the end; in those named ``keys{n}``, the argument."""
        properties: dict[str, Any] = dict(parameters.get("properties") or {})
        required = [name for name in parameters.get("required") or () if isinstance(name, str)]
        others = parameters.get("additionalProperties", "properties" not in parameters)
        for name in required:
            properties.setdefault(name, others if isinstance(others, dict) else {})
        if self._function.parameters is None:
            others = False
        keys = list(properties)
        needed = [keys.index(name) for name in required]
        free = others is not False and not isinstance(self._function, TextFunction)
        last = len(keys) + (_MAX_OTHERS if free else 0)
        for number in range(last + 1):
            may_end = not any(each >= number for each in needed)
            arguments = [f"{rule}_key{number}"] if number < last else []
            if number < len(keys) and number not in needed and number + 1 < last:
                arguments.append(f"{rule}_keys{number + 1}")  # this one is left out
            self._add_more(f"{rule}_more{number}", f"{rule}_keys{number}", arguments, may_end)
            if number == last:
                break
            key = keys[number] if number < len(keys) else None
            schema = others if key is None else properties[key]
            after = _After(
                f"{rule}_more{number + 1}",
                f"{rule}_keys{number + 1}" if number + 1 < last else "",
                not any(each > number for each in needed),
            )
            self._add_argument(f"{rule}_key{number}", key, schema, keys, after)

    def _add_more(self, more: str, keys: str, arguments: Sequence[str], may_end: bool) -> None:
        ways = []
        if arguments:
            self._rules.append(f"{keys}: {' | '.join(arguments)}")
            ways.append(f"{self._tokens.to_lark(self._prefix)} {keys}")
        if may_end:
            ways.append(self._tokens.to_lark(self._end + self._after_end))
        if more in self._used or more.endswith("_more0"):
            self._rules.append(f"{more}: {' | '.join(ways)}")

    def _add_argument(
        self, rule: str, name: str | None, schema: Any, keys: Sequence[str], after: _After
    ) -> None:
        """Add the rule of an argument, from its key to the end of the call."""
        to_lark, template = self._tokens.to_lark, self._template
        ways = []
        if name is None:
            listed = "|".join(map(escaped_regex, keys))
            excluded = f" & ~/({listed})/" if keys else ""
            self._rules.append(f"{rule.upper()}_NAME: {_OTHER_KEY}{excluded}")
        for number, value in enumerate(self._values(name, schema)):
            opening = template.argument.removeprefix(self._prefix)
            opening = opening.replace("{is_text}", json.dumps(value.is_text))
            key = to_lark(opening.replace("{key}", name or ""))
            if name is None:
                key = f"{rule.upper()}_NAME {to_lark(opening.removeprefix('{key}'))}"
            own = f"{rule}_{number}"
            if not value.text or not self._looks_ahead:
                self._used.add(after.more)
            end = to_lark(template.argument_end.replace("{key}", name or ""))
            if value.has_end:
                ways.append(f"{key} {value.written} {after.more}")
            elif not value.text:
                ways.append(f"{key} {value.written} {end} {after.more}")
            else:
                ways += [f"{key} {each}" for each in self._text(own, value.text, name, after)]
        self._rules.append(f"{rule}: {' | '.join(ways)}")

    def _text(self, own: str, text: str, name: str | None, after: _After) -> Iterator[str]:
        """Yield the ways in which text and what follows it may go on."""
        close, end = self._close, self._template.argument_end.replace("{key}", name or "")
        if not self._looks_ahead:
            if self._tokens.occur_in(close):
                # Text cannot contain its control token, so whitespace before the token may belong
                # to the text.
                self._rules.append(f"{own}: {text} {self._tokens.to_lark(end.lstrip())}")
            else:
                self._rules.append(f"{own}[suffix={json.dumps(end)}]: {text}")
            yield f"{own} {after.more}"
            return
        closing = self._closing(close, name) + _SPACES
        followers = []
        if after.keys:
            followers.append((self._prefix, after.keys))
        ends_alike = self._end.startswith(self._prefix)
        if after.may_end and not ends_alike:
            followers.append((self._end, self._tokens.to_lark(self._after_end)))
        elif after.may_end:
            rest = self._tokens.to_lark(self._end.removeprefix(self._prefix) + self._after_end)
            following = f"({after.keys} | {rest})" if after.keys else rest
            followers = [(self._prefix, following)]
        for start, following in followers:
            suffix = f"/{closing}{escaped_regex(start)}/"
            yield f"{self._ended_text(text, suffix)} {following}".rstrip()

    def _ended_text(self, text: str, suffix: str) -> str:
        """Return a rule for ``text`` with ``suffix``, which arguments share."""
        if (text, suffix) not in self._ended:
            self._ended[text, suffix] = f"{self._rule}_ended{len(self._ended)}"
            self._rules.append(f"{self._ended[text, suffix]}[suffix={suffix}]: {text}")
        return self._ended[text, suffix]

    # -- values --------------------------------------------------------------------

    def _values(self, name: str | None, schema: Any) -> list[_Value]:
        """Return the ways in which a value that ``schema`` allows is written."""
        function = self._function
        own: dict[str, Any] = schema if isinstance(schema, dict) else {}
        if isinstance(function, TextFunction):
            end = self._template.argument_end
            if self._tokens.occur_in(end):
                text = input_lark(function.input_grammar, quoted=False)
                written = f"{text} {self._tokens.to_lark(end.lstrip())}"
            else:
                written = input_lark(function.input_grammar, quoted=False, end=end)
            return [_Value(True, written=written, has_end=True)]
        root = function.parameters or {}
        plain = resolved({**root, "properties": {"value": own}})["properties"]["value"]
        choices = _choices(plain)
        if choices is not None:
            texts = [each for each in choices if isinstance(each, str)]
            rest = [each for each in choices if not isinstance(each, str)]
            found = []
            if texts:
                found.append(_Value(True, written=self._one_of(texts)))
            if rest:
                as_json = [json.dumps(each, ensure_ascii=False) for each in rest]
                found.append(_Value(False, written=self._one_of(as_json)))
            return found
        types = ValueSchema(plain).types
        if types and "string" not in types:
            return [self._json(own)]
        text_schema = _text_schema(plain)
        as_text = _Value(True, text=self._terminal(name, text_schema))
        others = types - {"string"} or (not types and "{is_text}" in self._template.argument)
        if others and ("{is_text}" in self._template.argument or text_schema):
            return [as_text, self._json(_without_text(plain) if types else own)]
        return [as_text]

    def _one_of(self, texts: Sequence[str]) -> str:
        return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in texts)})"

    def _json(self, schema: Mapping[str, Any]) -> _Value:
        root: Mapping[str, Any] = self._function.parameters or {}
        shared: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
        rule = f"{self._rule}_json{len(self._rules)}"
        self._rules.append(f"{rule}: {function_json({**shared, **schema}, self._function)}")
        return _Value(False, written=rule)

    def _terminal(self, name: str | None, schema: Mapping[str, Any]) -> str:
        """Return a terminal for text that ``schema`` allows."""
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        parts = [f"/(?s:.{{{least},{most}}})/" if least or most != "" else "/(?s:.*)/"]
        pattern, kind = schema.get("pattern"), schema.get("format")
        if isinstance(pattern, str):
            parts.append(f"/{self._anchored(name, pattern)}/")
        if isinstance(kind, str) and kind in _TEXT_FORMATS:
            parts.append(f"/{_within_slashes(_TEXT_FORMATS[kind])}/")
        elif isinstance(kind, str) and self._function.strict:
            raise self._invalid(name, f"the format {kind!r}")
        if "{is_text}" not in self._template.argument:
            parts.append(f"~{_JSON_TEXT}")
        if self._looks_ahead:
            ends = (self._prefix, self._end, self._stop)
            spelled = (each for each in ends if each and not self._tokens.occur_in(each))
            close = self._closing(self._close.strip(), name)
            following = "|".join(map(escaped_regex, spelled))
            parts.append(f"~/(?s:.*{close}{_SPACES}({following}).*)/")
        text = " & ".join(parts)
        if text not in self._texts:
            self._texts[text] = f"{self._rule.upper()}_TEXT{len(self._texts)}"
            self._rules.append(f"{self._texts[text]}: {text}")
        return self._texts[text]

    def _closing(self, close: str, name: str | None) -> str:
        """Return an expression for the closing tag of an argument."""
        before, key, after = close.partition("{key}")
        own = escaped_regex(name) if name is not None else "[^<>]{1,64}"
        return escaped_regex(before) + (own if key else "") + escaped_regex(after)

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
        return _within_slashes(f"{start}({inner}){'' if ends else '(?s:.*)'}")

    def _invalid(self, name: str | None, what: str) -> InvalidRequest:
        tool = self._function.name
        where = f" of the argument '{name}'" if name else ""
        return InvalidRequest(
            f"The tool '{tool}' cannot be enforced: {what}{where} is not supported.", param="tools"
        )


class _After(NamedTuple):
    """What may follow an argument."""

    more: str  # the rule of everything that follows
    keys: str  # the rule of what follows the prefix of another argument; empty: none may follow
    may_end: bool


_TEXT_KEYWORDS = ("minLength", "maxLength", "pattern", "format")


def _format_of(template: CallTemplate) -> CallFormat:
    """Return the format with this template, of which ``begin`` may be without its first text."""
    return next(
        each
        for each in CALL_FORMATS.values()
        if each.template._replace(begin=template.begin) == template
    )


def _variants(function: FunctionDefinition) -> Iterator[Mapping[str, Any]]:
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
    yield from _alternatives(root)


def _alternatives(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield schemas without combinations at their root."""
    for keyword in ("allOf", "anyOf", "oneOf"):
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
            for each in parts[:_MAX_OTHERS]:
                yield from _alternatives(_both(rest, each))
        return
    yield schema


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of what both schemas allow."""
    out = {**one, **other}
    for key in ("properties", "$defs", "definitions"):
        if key in one or key in other:
            out[key] = {**(one.get(key) or {}), **(other.get(key) or {})}
    lists = [each.get("required") or [] for each in (one, other)]
    if all(isinstance(each, list) for each in lists):
        out["required"] = list(dict.fromkeys([*lists[0], *lists[1]]))
    return out


def _choices(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that ``schema`` allows, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return list(schema["enum"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        others = schema.get(keyword)
        if not isinstance(others, list) or not others:
            continue
        found = [_choices(each) if isinstance(each, dict) else None for each in others]
        null = [None]
        for number, each in enumerate(others):
            if isinstance(each, dict) and each.get("type") == "null":
                found[number] = null
        if keyword == "allOf":
            return next((each for each in found if each is not None), None)
        if all(each is not None for each in found):
            return [value for each in found for value in each or ()]
    return None


def _text_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of ``schema`` that constrains text."""
    parts = list(with_alternatives(schema))
    own = [each for each in parts if any(key in each for key in _TEXT_KEYWORDS)]
    texts = [each for each in own if "string" in ValueSchema(each).types or "type" not in each]
    plain = [
        each
        for each in parts
        if each.get("type") == "string" and not any(key in each for key in _TEXT_KEYWORDS)
    ]
    if not texts or ("anyOf" in schema and plain):
        return {}
    return {key: each[key] for each in texts for key in _TEXT_KEYWORDS if key in each}


def _without_text(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``schema`` without text."""
    out = {key: value for key, value in schema.items() if key not in _TEXT_KEYWORDS}
    if isinstance(out.get("type"), list):
        out["type"] = [each for each in out["type"] if each != "string"]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(others := out.get(keyword), list):
            out[keyword] = [
                each for each in others if ValueSchema(each).types != frozenset({"string"})
            ]
    return out


def _within_slashes(expression: str) -> str:
    """Return a regular expression in Lark's syntax."""
    special = {"/": r"\/", "\n": r"\n", "\r": r"\r", r"\d": "[0-9]", r"\D": "[^0-9]"}
    written = regex.sub(r"\\.|/|[\r\n]", lambda found: special.get(found[0], found[0]), expression)
    return str(written)
