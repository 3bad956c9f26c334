"""Parts of grammars: texts with control tokens, and JSON that is valid under a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from router.schemas.conversation import FunctionDefinition
from router.tokens.literals import literal_pattern
from shared.bounded_schema import bounded

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON formatted as templates format earlier calls, so that it has the same tokens."""
_WITHOUT_SPACE = ("string", "integer", "number", "boolean", "null")
"""Types to which this does not apply."""
_OTHER_PROPERTIES = (
    "additionalProperties patternProperties propertyNames unevaluatedProperties minProperties"
    " dependentRequired dependentSchemas dependencies".split()
)
_COMBINED = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")


class ControlTokens:
    """The tokens of a tokenizer that a grammar matches only by token, never as text."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self.control = control
        """Token ids by text."""
        self._pattern = literal_pattern(control)

    def occur_in(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def to_lark(self, text: str) -> str:
        """Return an expression that matches exactly ``text``; empty if there is no text."""
        if not text:
            return ""
        pieces: list[str] = []
        end = 0
        for found in self._pattern.finditer(text) if self._pattern is not None else ():
            pieces += (_quoted(text[end : found.start()]), f"<[{self.control[found[0]]}]>")
            end = found.end()
        return " ".join(filter(None, [*pieces, _quoted(text[end:])]))

    def text_without(self, *excluded: str, at_line_start: str = "") -> str:
        """Return a terminal for any text without ``excluded`` and without control tokens, and
        without ``at_line_start`` at the start of a line."""
        spelled = [each for each in excluded if each not in self.control]
        parts = [f"~/(?s:.*{escaped_regex(each)}.*)/" for each in spelled if each]
        if at_line_start and not self.occur_in(at_line_start):
            parts.append(rf"~/(?s:(.*\n)?[ \t]*{escaped_regex(at_line_start)}.*)/")
        return " & ".join(["/(?s:.*)/", *parts])


def _quoted(text: str) -> str:
    """Return a Lark string for ``text``; empty if the text is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def function_json(schema: Mapping[str, Any], function: FunctionDefinition) -> str:
    """Return the rule of a schema. Keywords unknown to llguidance are an error if the function is
    strict, and ignored otherwise."""
    style: dict[str, Any] = {} if schema.get("type") in _WITHOUT_SPACE else {**_JSON_STYLE}
    if not function.strict:
        style["lenient"] = True
    kind = {"type": "object"} if "properties" in schema else {}
    return json_rule(_closed({**kind, **schema}), style)


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``schema`` limited to the properties that it names, unless it specifies others. A tool
    expects no others, and a small model would keep inventing them."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(key in schema for key in _COMBINED):
        return schema
    own = {k: _closed(v) if isinstance(v, dict) else v for k, v in properties.items()}
    names_all = _names_all(properties, schema.get("required"))
    if not names_all or any(key in schema for key in _OTHER_PROPERTIES):
        return {**schema, "properties": own}
    return {**schema, "properties": own, "additionalProperties": False}


def _names_all(properties: Mapping[str, Any], required: object) -> bool:
    """Return whether ``required``, which may be anything that a client wrote, names only
    ``properties``."""
    if not required:
        return True
    names = required if isinstance(required, list) else [required]
    return all(isinstance(name, str) and name in properties for name in names)


def json_rule(schema: Mapping[str, Any], style: Mapping[str, Any] = _JSON_STYLE) -> str:
    """Return the expression of JSON that is valid under ``schema``, with bounds for numbers."""
    guidance = {"x-guidance": style} if style else {}
    return "%json " + json.dumps({**bounded(schema), **guidance}, ensure_ascii=False)


def escaped_regex(text: str) -> str:
    return re.sub(r"[\\.^$|?*+()\[\]{}/]", r"\\\g<0>", text).replace("\n", "\\n")


def within_slashes(expression: str) -> str:
    """Return a regular expression in Lark's syntax. Digits are ASCII digits, as in all expressions
    here."""
    special = {"/": r"\/", r"\d": "[0-9]", r"\D": "[^0-9]", "\n": r"\n", "\r": r"\r"}
    return re.sub(
        r"\\.|/|[\r\n]", lambda found: special.get(found[0], found[0]), expression, flags=re.DOTALL
    )
