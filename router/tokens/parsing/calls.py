"""Formats of tool calls: how a model family writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import regex

from router.tokens.parsing.json_reader import JSON_STYLE, Style
from router.tokens.parsing.tagged import Tags

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools in the format of templates."""


class CallTemplate(NamedTuple):
    """How calls are written: each consists of ``begin``, its arguments, and ``end``. In these
    texts ``{name}`` and ``{key}`` are replaced by names, ``{number}`` by any number, and
    ``{is_text}`` by true or false: whether an argument is text instead of JSON."""

    begin: str
    end: str
    between: str = ""  # between two calls
    before: str = ""  # before all calls
    after: str = ""  # after all calls
    argument: str = ""  # before each argument; empty: the arguments are a JSON object
    argument_end: str = ""
    separator: str = ""  # between two arguments


class CallFormat(NamedTuple):
    """The format of a model's tool calls."""

    name: str
    """The value of `--tool-parser`."""
    start: str
    """The marker before calls; empty: the whole answer is calls, or it has none."""
    end: str
    """The marker after calls; empty: they last as long as one follows another."""
    template: CallTemplate
    """How calls are written."""
    heads: tuple[str, ...] = ()
    """Regular expressions for the text before the arguments of a call. ``NAME`` in them matches the
    tool's name; a group ``id`` is the call's. Quantifiers are possessive (``*+``) where they could
    backtrack: a model may write anything. Without any expressions, a call is a JSON object with a
    name and arguments, which may follow the marker in all formats."""
    opener: str = ""
    """The start of a call that also begins calls, for models that forget the marker."""
    opener_at_line_start: bool = True
    """Whether the opener counts only at the start of a line."""
    call_ends: tuple[str, ...] = ()
    """What ends a call. It may stand between calls, and ends arguments that lack a bracket."""
    tags: Tags | None = None
    """The tags of arguments; None: they are one object."""
    style: Style = JSON_STYLE
    """How that object is written."""

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.start, self.opener)))


PLAIN_NAME = regex.compile(r"[\w$@][\w$@./-]*")
"""A name that needs no quotes."""
PLAIN_TEMPLATE = CallTemplate('{"name": "{name}", "arguments": ', "}")
JSON = CallFormat("json", "", "", PLAIN_TEMPLATE._replace(between="\n"))


# -- writing calls ---------------------------------------------------------------


def written_calls(format: CallFormat, functions: Sequence[Mapping[str, Any]]) -> str:
    """Return calls of ``functions``, each with ``name`` and ``arguments``, as the model writes
    them. Arguments may be text, which is written as it is."""
    template = format.template
    calls = [
        template.begin.replace("{number}", str(number)).replace("{name}", function["name"])
        + _written_arguments(format, function["arguments"])
        + template.end
        for number, function in enumerate(functions)
    ]
    return template.before + template.between.join(calls) + template.after


def _written_arguments(format: CallFormat, arguments: Any) -> str:
    template = format.template
    if isinstance(arguments, str):
        return arguments
    if not template.argument or not isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    members = []
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        name = key if format.tags is not None else written_key(format, key)
        around = template.argument.replace("{is_text}", json.dumps(is_text)), template.argument_end
        before, after = (text.replace("{key}", name) for text in around)
        text = value if is_text and format.tags is not None else written_value(format, value)
        members.append(before + text + after)
    return template.separator.join(members)


def written_value(format: CallFormat, value: Any) -> str:
    """Return a value in the notation of a format: JSON, unless it lists its arguments in
    brackets."""
    separator, style = format.template.separator, format.style
    if format.tags is not None or not separator:
        return json.dumps(value, ensure_ascii=False)
    match value:
        case str() if style.python:  # `repr` would escape unusual characters
            return json.dumps(value, ensure_ascii=False)
        case str():
            return style.quotes[0] + value + style.quotes[0]
        case list():
            return f"[{separator.join(written_value(format, each) for each in value)}]"
        case dict():
            members = (
                f"{written_value(format, key)}: {written_value(format, each)}"
                if style.python
                else f"{written_key(format, key)}:{written_value(format, each)}"
                for key, each in value.items()
            )
            return f"{{{separator.join(members)}}}"
    return repr(value) if style.python else json.dumps(value)


def written_key(format: CallFormat, key: str) -> str:
    """Return the name of an argument, or of a member of an object, in brackets."""
    quote = format.style.quotes[0]
    return key if PLAIN_NAME.fullmatch(key) else quote + key + quote


# -- schemas ---------------------------------------------------------------------


def with_plain_properties(tools: ToolSchemas) -> list[Mapping[str, Any]]:
    """Return ``tools`` with references replaced by the schemas of the arguments: readers look up
    types and do not follow references."""
    return [
        {**tool, "function": {**function, "parameters": resolved(function["parameters"])}}
        for tool in tools
        for function in (tool["function"],)
    ]


def resolved(schema: Any) -> Any:
    """Return ``schema`` with each reference in a property, or in alternatives of schemas, replaced
    by the schema it names. Recursive references stay, and those beyond what any person writes: a
    few that refer to each other could stand for billions of schemas."""
    left = _MAX_REFERRED

    def target_of(reference: str) -> Any:
        target: Any = schema
        for key in reference.removeprefix("#").split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        return target

    def plain(own: Any, within: tuple[str, ...]) -> Any:
        nonlocal left
        if not isinstance(own, dict):
            return own
        left -= bool(within)
        reference = own.get("$ref") if left > 0 else None
        if isinstance(reference, str) and reference[:1] == "#" and reference not in within:
            target = target_of(reference)
            if isinstance(target, dict) and len(within) < _MAX_REFERENCES:
                rest = {key: value for key, value in own.items() if key != "$ref"}
                return plain({**target, **rest}, (*within, reference))
        out = dict(own)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(others := own.get(keyword), list):
                out[keyword] = [plain(each, within) for each in others]
        return out

    root = plain(schema, ())
    if isinstance(root, dict) and isinstance(properties := root.get("properties"), dict):
        root["properties"] = {key: plain(each, ()) for key, each in properties.items()}
    return root


_MAX_REFERENCES = 8
"""Max depth of references within each other."""
_MAX_REFERRED = 2000
"""Max number of schemas that take the place of references."""
