"""Arguments between tags are what the model wrote: text with its whitespace, other values with the
types of the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.tokens.parsing.calls import with_plain_properties
from router.tokens.parsing.formats import CALL_FORMATS, ReplyState
from router.tokens.parsing.marked import MarkedReplyParser
from router.tokens.parsing.syntaxes import syntax_named
from tests.router.tokens.parsing.test_marked import calls_in, format_of

STRING, NULL = {"type": "string"}, {"type": "null"}
PROPERTIES: dict[str, Any] = {"text": STRING, "choice": {"enum": ["1", "2"]}, "unknown": {}}
PROPERTIES |= {"named": {"$ref": "#/$defs/Named"}, "list": {"type": "array", "items": STRING}}
PROPERTIES |= {"optional": {"anyOf": [STRING, NULL]}, "either": {"type": ["string", "null"]}}
PROPERTIES |= {"count": {"type": "integer"}, "share": {"type": "number"}}
PROPERTIES |= {"flag": {"type": "boolean"}, "object": {"type": "object"}}
PROPERTIES |= {"maybe": {"anyOf": [{"type": "integer"}, NULL]}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"Named": {"type": "string"}}}
TOOLS = with_plain_properties(
    [{"type": "function", "function": {"name": "edit", "parameters": PARAMETERS}}]
)
WRITTEN = {
    name: each.template
    for name, each in CALL_FORMATS.items()
    if each.tags and each.template.argument
}
"""How each model writes a call."""


def written(parser: str, arguments: dict[str, str], *, is_text: bool = True) -> str:
    syntax, template = syntax_named(parser), WRITTEN[parser]
    pieces = [template.before, template.begin.replace("{name}", "edit")]
    for key, text in arguments.items():
        opening = template.argument.replace("{is_text}", json.dumps(is_text))
        pieces += [opening.replace("{key}", key), text, template.argument_end.replace("{key}", key)]
    whole = "".join([*pieces, template.end, template.after])
    assert whole.startswith(syntax.start)
    return whole


def read(parser: str, text: str) -> list[Any]:
    """Return the arguments of the call in ``text``, read as it arrives."""
    found = []
    for size in (1, 7, len(text)):
        reply = MarkedReplyParser(format_of(parser), ReplyState.NORMAL, TOOLS)
        parts = [reply.feed(text[at : at + size]) for at in range(0, len(text), size)]
        calls = [call for each in (*parts, reply.finish()) for call in calls_in(each)]
        found.append(json.loads("".join(call.arguments for call in calls)))
    return found


@pytest.mark.parametrize("parser", WRITTEN)
def test_text_stays_as_it_was_written(parser: str) -> None:
    code = "    if a < b:\n        return\n"
    texts = {"optional": "true", "either": "12", "choice": "1", "named": "null"}
    for whitespace in (" ", "\t", "\n\n", "\n", ""):
        arguments = {"text": whitespace + code + whitespace, **texts}
        found = read(parser, written(parser, arguments))
        assert found == [arguments] * len(found)


@pytest.mark.parametrize("parser", WRITTEN)
def test_other_values_have_the_types_of_the_schema(parser: str) -> None:
    values: dict[str, Any] = {"count": 3, "share": 0.5, "flag": True, "maybe": None}
    values |= {"optional": None, "list": ["1", "a\n"], "object": {"a": "b"}, "unknown": {"a": [1]}}
    text = written(parser, {key: json.dumps(value) for key, value in values.items()}, is_text=False)
    found = read(parser, text)
    assert found == [values] * len(found)


@pytest.mark.parametrize("parser", [name for name in WRITTEN if "deepseek" not in name])
def test_values_of_another_type_are_read_as_far_as_they_mean_one_thing(parser: str) -> None:
    values: dict[str, tuple[str, Any]] = {
        "flag": ("False", False),
        "count": ("4.0", 4),
        "maybe": ("many", "many"),
        "list": ("('a', 'b')", ["a", "b"]),
        "either": ("None", None),
        "text": ("None", "None"),
    }
    found = read(parser, written(parser, {key: text for key, (text, _) in values.items()}))
    assert found == [{key: value for key, (_, value) in values.items()}] * len(found)
