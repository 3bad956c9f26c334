"""Grammars of calls with each argument between tags, as `router.tokens.parsing.tagged` reads them.

A value is text up to a closing tag that another tag of the call follows. The grammar therefore
matches the closing tag together with the start of what follows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from router.schemas.conversation import FunctionDefinition, TextFunction
from router.schemas.value_schema import ValueSchema, with_alternatives
from router.tokens.parsing.call_rules import (
    MAX_OTHERS,
    TEXT_KEYWORDS,
    CallRules,
    choices,
    variants,
)
from router.tokens.parsing.calls import CallFormat
from router.tokens.parsing.input_grammars import input_lark
from router.tokens.parsing.lark_parts import ControlTokens, escaped_regex

_SPACES = r"\s{0,8}"
_OTHER_KEY = r"/[^<>\"'\s\x00-\x1f]{1,64}/"
_JSON_TEXT = r'\s*"([^"\\]|\\.)*"\s*'
"""Not written as text: quotes around a value would become part of it."""


class TaggedCall(CallRules):
    """The rules of a call after its head."""

    def __init__(
        self, rule: str, format: CallFormat, function: FunctionDefinition, tokens: ControlTokens
    ) -> None:
        super().__init__(rule, format, function, tokens)
        assert format.tags is not None
        self._end = format.tags.end or format.end
        self._stop = format.end if format.tags.end else ""
        self._prefix = self._template.argument.partition("{key}")[0]
        self._after_end = self._template.end.partition(self._end)[2]
        self._close = self._template.argument_end.rstrip()
        self._ended: dict[tuple[str, str], str] = {}
        closing = [self._close, self._prefix, self._end]
        self._looks_ahead = not any(map(tokens.occur_in, closing))

    def rules(self) -> list[str]:
        """Return the rules, the first of which is for everything after the head. Raises
        `InvalidRequest` for keywords that cannot be enforced."""
        starts = []
        for number, parameters in enumerate(variants(self._function)):
            self._add_variant(f"{self._rule}v{number}", parameters)
            self._check_size()
            starts.append(f"{self._rule}v{number}_more0")
        return [f"{self._rule}_more: {' | '.join(starts)}", *self._rules]

    def _add_variant(self, rule: str, parameters: Mapping[str, Any]) -> None:
        """Add rules for calls with ``parameters``. In those named ``more{n}``, the prefix of an
        argument from the n-th on follows, or the end; in those named ``keys{n}``, the argument."""
        properties, required, others = self._members(parameters)
        keys = list(properties)
        needed = {number for number, key in enumerate(keys) if key in required}
        last_needed = max(needed, default=-1)
        last = len(keys) + (MAX_OTHERS if others is not False else 0)
        prefix = self._tokens.to_lark(self._prefix)
        end = self._tokens.to_lark(self._end + self._after_end)
        for number in range(last + 1):
            ways = [f"{prefix} {rule}_keys{number}"] if number < last else []
            ways += [end] if last_needed < number else []
            self._rules.append(f"{rule}_more{number}: {' | '.join(ways)}")
            if number == last:
                break
            may_go_on = number + 1 < last
            is_optional = number < len(keys) and number not in needed and may_go_on
            left_out = f" | {rule}_keys{number + 1}" if is_optional else ""
            self._rules.append(f"{rule}_keys{number}: {rule}_key{number}{left_out}")
            key = keys[number] if number < len(keys) else None
            after = _After(
                f"{rule}_more{number + 1}",
                f"{rule}_keys{number + 1}" if may_go_on else "",
                last_needed <= number,
            )
            schema = others if key is None else properties[key]
            self._add_argument(f"{rule}_key{number}", key, schema, keys, after)

    def _add_argument(
        self, rule: str, name: str | None, schema: Any, keys: Sequence[str], after: _After
    ) -> None:
        """Add the rule of an argument, from its key to the end of the call."""
        to_lark = self._tokens.to_lark
        if name is None:
            listed = "|".join(map(escaped_regex, keys))
            excluded = f" & ~/({listed})/" if keys else ""
            self._rules.append(f"{rule.upper()}_NAME: {_OTHER_KEY}{excluded}")
        ways = []
        for is_text, rest in self._values(rule, name, schema, after):
            opening = self._template.argument.removeprefix(self._prefix)
            opening = opening.replace("{is_text}", json.dumps(is_text))
            key = to_lark(opening.replace("{key}", name or ""))
            if name is None:
                key = f"{rule.upper()}_NAME {to_lark(opening.removeprefix('{key}'))}"
            ways.append(f"{key} {rest}")
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

    def _values(
        self, rule: str, name: str | None, schema: Any, after: _After
    ) -> Iterator[tuple[bool, str]]:
        """Yield the ways in which a value that ``schema`` allows is written, with what follows it,
        and whether it is text."""
        function, spelled_end = self._function, self._template.argument_end
        is_told = "{is_text}" in self._template.argument
        own: dict[str, Any] = schema if isinstance(schema, dict) else {}
        following = f"{self._tokens.to_lark(spelled_end.replace('{key}', name or ''))} {after.more}"
        if isinstance(function, TextFunction):
            if self._tokens.occur_in(spelled_end):
                text = input_lark(function.input_grammar, quoted=False)
                text += f" {self._tokens.to_lark(spelled_end.lstrip())}"
            else:
                text = input_lark(function.input_grammar, quoted=False, end=spelled_end)
            yield True, f"{text} {after.more}"
            return
        plain = self._plain(own)
        if (listed := choices(plain)) is not None:
            texts = [each for each in listed if isinstance(each, str)]
            rest = [each for each in listed if not isinstance(each, str)]
            as_json = [json.dumps(each, ensure_ascii=False) for each in rest]
            for is_text, written in ((True, texts), (False, as_json)):
                if written:
                    yield is_text, f"{_one_of(written)} {following}"
            return
        types = ValueSchema(plain).types
        if types and "string" not in types:
            yield False, f"{self._json(own)} {following}"
            return
        constraints = _text_schema(plain)
        terminal = self._terminal(name, constraints, self._not_text(name))
        yield from ((True, each) for each in self._text(f"{rule}_text", terminal, name, after))
        others = types - {"string"} or (not types and is_told)
        if others and (is_told or constraints):
            yield False, f"{self._json(_without_text(plain) if types else own)} {following}"

    def _not_text(self, name: str | None) -> list[str]:
        """Return expressions for text that would not be read as it is written."""
        excluded = [] if "{is_text}" in self._template.argument else [_JSON_TEXT]
        if self._looks_ahead:
            ends = (self._prefix, self._end, self._stop)
            spelled = (each for each in ends if each and not self._tokens.occur_in(each))
            close = self._closing(self._close.strip(), name)
            following = "|".join(map(escaped_regex, spelled))
            excluded.append(f"(?s:.*{close}{_SPACES}({following}).*)")
        return excluded

    def _closing(self, close: str, name: str | None) -> str:
        """Return an expression for the closing tag of an argument."""
        before, key, after = close.partition("{key}")
        own = escaped_regex(name) if name is not None else "[^<>]{1,64}"
        return escaped_regex(before) + (own if key else "") + escaped_regex(after)


class _After(NamedTuple):
    """What may follow an argument."""

    more: str  # the rule of everything that follows
    keys: str  # the rule of what follows the prefix of another argument; empty: none may follow
    may_end: bool


def _one_of(texts: Sequence[str]) -> str:
    """Return an expression for any of ``texts``."""
    return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in texts)})"


def _text_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of ``schema`` that constrains text."""
    parts = list(with_alternatives(schema))
    own = [each for each in parts if any(key in each for key in TEXT_KEYWORDS)]
    texts = [each for each in own if "string" in ValueSchema(each).types or "type" not in each]
    plain = [
        each
        for each in parts
        if each.get("type") == "string" and not any(key in each for key in TEXT_KEYWORDS)
    ]
    if not texts or ("anyOf" in schema and plain):
        return {}
    return {key: each[key] for each in texts for key in TEXT_KEYWORDS if key in each}


def _without_text(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``schema`` without text."""
    out = {key: value for key, value in schema.items() if key not in TEXT_KEYWORDS}
    if isinstance(out.get("type"), list):
        out["type"] = [each for each in out["type"] if each != "string"]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(others := out.get(keyword), list):
            out[keyword] = [
                each for each in others if ValueSchema(each).types != frozenset({"string"})
            ]
    return out
