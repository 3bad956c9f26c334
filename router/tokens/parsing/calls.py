"""The tool calls in a stretch of generated text, as far as they can be told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MAX_CALL_CHARS = 1_000_000
MAX_PARSE_WORK = 5_000_000
"""Characters times places where a call may begin: some parsers read on to the end from each.
As much takes about half a second; honest calls of 50,000 characters have a hundred."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools as templates and mlx-lm's parsers have them."""

_CALL_STARTS = {
    "pythonic": re.compile(r"\[[\w.]+\("),
    "gemma4": re.compile("call:"),
    "function_gemma": re.compile("call:"),
    "muse_spark": re.compile("<atem:(invoke|parameter)"),
    "kimi_k3": re.compile(r"<\|open\|>"),
}
_FENCE = re.compile(r"\A```(?:json|tool_call|tool_code)?\s*(.*?)\s*(?:```)?\Z", re.DOTALL)
_BETWEEN = re.compile(r"[\s;,]*")
_PYTHON_TAG = "<|python_tag|>"
_BEGINNINGS = tuple(
    prefix + "{" + key
    for prefix in ("", "[", "```json", "```json[", "```", "```[", _PYTHON_TAG)
    for key in ('"name":"', '"type":"function"', '"function":', '"parameters":', '"arguments":')
)
_LONGEST_BEGINNING = max(map(len, _BEGINNINGS))


class ParsedCall(NamedTuple):
    """``arguments`` is JSON text of an object."""

    name: str
    arguments: str
    id: str | None = None


class ToolSyntax(NamedTuple):
    """How a model writes calls: between ``start`` and ``end``, in a way that ``parse``
    understands. Without a ``start`` a whole reply is calls or none; without an ``end``
    they go on to the end of the reply.

    ``parse`` is given the text and the tools. It answers with a dict that has ``name`` and
    ``arguments``, or a list of them, and raises whatever it likes.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, Any], Any]


def parse_calls(text: str, syntax: ToolSyntax, tools: ToolSchemas) -> list[ParsedCall]:
    """The calls of ``tools`` that ``text`` consists of; none when any of it is unclear."""
    begins = _CALL_STARTS.get(syntax.name)
    work = len(text) * sum(1 for _ in begins.finditer(text)) if begins is not None else 0
    if len(text) > MAX_CALL_CHARS or work > MAX_PARSE_WORK:
        return []
    names = {tool["function"]["name"] for tool in tools}
    for attempt in (syntax.parse, _parse_stripped(syntax), _parse_json):
        try:
            calls = [_call(each, names) for each in _listed(attempt(text, tools))]
        except Exception:  # generated text, and a parser that expects another one
            continue
        if calls:
            return calls
    return []


def parse_complete_json_calls(text: str, tools: ToolSchemas) -> tuple[list[ParsedCall], str]:
    """The calls of ``tools`` that ``text`` begins with, as JSON, and what follows the last that
    is complete: of a reply that was cut short."""
    if len(text) > MAX_CALL_CHARS:
        return [], text
    names = {tool["function"]["name"] for tool in tools}
    rest = text.lstrip().removeprefix(_PYTHON_TAG).lstrip()
    calls: list[ParsedCall] = []
    read = 0
    try:
        for value, end in _json_values(rest):
            calls += [_call(each, names) for each in _listed(value)]
            read = end
    except Exception:  # generated text
        pass
    return (calls, rest[read:]) if calls else ([], text)


def with_plain_properties(tools: ToolSchemas) -> list[Mapping[str, Any]]:
    """``tools`` with the schemas of arguments in their places: parsers look for types there and
    follow no references."""

    def plain(schema: Any, root: Mapping[str, Any]) -> Any:
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for key in reference[2:].split("/"):
            found = found.get(key) if isinstance(found, dict) else None
        return schema if found is None else found

    out = []
    for tool in tools:
        function = tool["function"]
        parameters = function["parameters"]
        properties = parameters.get("properties")
        if isinstance(properties, dict):
            properties = {key: plain(schema, parameters) for key, schema in properties.items()}
            parameters = {**parameters, "properties": properties}
            tool = {**tool, "function": {**function, "parameters": parameters}}
        out.append(tool)
    return out


def is_unfinished_json(text: str) -> bool:
    """Whether ``text`` is JSON that breaks off within a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def may_become_json_calls(pieces: Sequence[str]) -> bool:
    """Whether a reply that begins with ``pieces`` may be nothing but calls, written as JSON."""
    begun = ""
    for piece in pieces:
        if len(begun) > _LONGEST_BEGINNING:
            break
        begun += "".join(piece.split())
    return any(known.startswith(begun) or begun.startswith(known) for known in _BEGINNINGS)


def _parse_stripped(syntax: ToolSyntax) -> Callable[[str, Any], Any]:
    return lambda text, tools: syntax.parse(text.strip(), tools)


def _parse_json(text: str, tools: Any) -> list[Any]:
    """JSON values one after the other, perhaps in a fence."""
    text = text.strip().removeprefix(_PYTHON_TAG).strip()
    fenced = _FENCE.match(text)
    if fenced:
        text = fenced[1]
    return [each for value, _ in _json_values(text) for each in _listed(value)]


def _json_values(text: str) -> Iterator[tuple[Any, int]]:
    """The JSON values that ``text`` consists of, and where what follows each begins. Raises
    `ValueError` behind the last that is one."""
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        space = _BETWEEN.match(text, position)
        position = space.end() if space else position
        yield value, position


JSON = ToolSyntax("json", "", "", _parse_json)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call(parsed: Any, names: Collection[str]) -> ParsedCall:
    """Raises for anything that is not a call of one of ``names``."""
    function = parsed.get("function")
    inner = function if isinstance(function, dict) else parsed
    name: Any = inner.get("name", function if isinstance(function, str) else None)
    name = name if name in names else str(name).removeprefix("functions.")
    if name not in names:
        raise ValueError(f"no tool {name!r}")
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    own_id = parsed.get("id")
    return ParsedCall(
        name, _json(arguments), own_id if isinstance(own_id, str) and own_id else None
    )


def _json(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, from an escape
        text = json.dumps(arguments, allow_nan=False)
    return text
