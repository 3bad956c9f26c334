"""Parsing of tool calls in generated text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from router.tokens.parsing.json_reader import JsonReader, repaired

MAX_CALL_CHARS = 1_000_000
MAX_PARSE_WORK = 5_000_000
"""Max number of characters times the places where a call may begin: some parsers read to the end
from each place. This much takes about half a second. Real calls of 50,000 characters have 100
places."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools in the format of templates and mlx-lm's parsers."""

_MAX_REPAIRS = 100
"""Max number of JSON values of one text that are repaired: the text after each is copied."""

_CALL_STARTS = {
    "pythonic": re.compile(r"\[[\w.]+\("),
    "gemma4": re.compile("call:"),
    "function_gemma": re.compile("call:"),
    "muse_spark": re.compile("<atem:(invoke|parameter)"),
    "kimi_k3": re.compile(r"<\|open\|>"),
}
_START_MARKS = {
    "pythonic": "[",
    "gemma4": ":",
    "function_gemma": ":",
    "muse_spark": "<",
    "kimi_k3": "<",
}
"""A character that occurs once at the start of each call."""
_SHORTEST_START = 3
"""The length of the shortest start of a call."""
_FENCES = "```json", "```tool_call", "```tool_code", "```"
_FENCE = re.compile(r"\A(?:" + "|".join(_FENCES) + ")")
_BETWEEN = re.compile(r"[\s;,]*")
_PYTHON_TAGS = "<|python_tag|>", "<|python_start|>"
"""Before calls of Llama 3 and of Llama 4."""
_PYTHON_END = "<|python_end|>"
_BEFORE_CALLS = (*_PYTHON_TAGS, _PYTHON_TAGS[1] + _PYTHON_END)
_BEGINNINGS = tuple(
    before + after + bracket + "{" + key
    for fence in ("", *_FENCES)
    for tag in ("", *_BEFORE_CALLS)
    for before, after in {(fence, tag), (tag, fence)}
    for bracket in ("", "[")
    for key in ('"name":"', '"type":"function"', '"function":', '"parameters":', '"arguments":')
)
_LONGEST_BEGINNING = max(map(len, _BEGINNINGS))


class ParsedCall(NamedTuple):
    """A tool call in an answer."""

    name: str
    arguments: str  # a JSON object
    id: str | None = None


class ToolSyntax(NamedTuple):
    """The syntax of a model's tool calls."""

    name: str
    start: str  # the marker before calls; empty: the whole answer is calls, or it has none
    end: str  # the marker after calls; empty: they last until the end of the answer
    parse: Callable[[str, Any], Any]
    """Parses the text between the markers. Returns a dict with ``name`` and ``arguments``, or a
    list of them. May raise any exception."""


class ParseWork:
    """The work of parsing a growing text that may be calls, which is limited."""

    def __init__(self, syntax_name: str) -> None:
        self._mark = _START_MARKS.get(syntax_name)
        self._chars = self._places = 0

    def add(self, text: str) -> None:
        self._chars += len(text)
        if self._mark is not None:
            self._places += text.count(self._mark)

    def with_more(self, chars: int) -> int:
        """Return the work, in the unit of `MAX_PARSE_WORK`, after ``chars`` more characters."""
        places = 0 if self._mark is None else self._places + chars // _SHORTEST_START
        return (self._chars + chars) * (1 + places)


def parse_work(text: str, syntax_name: str) -> int:
    """Return the work of parsing ``text``: the characters times the places where a call may begin,
    or the characters alone if nothing is read twice."""
    start = _CALL_STARTS.get(syntax_name)
    return len(text) * (1 if start is None else 1 + sum(1 for _ in start.finditer(text)))


def parse_calls(
    text: str, syntax: ToolSyntax, tools: ToolSchemas, *, repair: bool = True
) -> list[ParsedCall]:
    """Return the calls of ``tools`` in ``text``, or none if a part of it is not a valid call. With
    ``repair``, common errors in JSON are repaired (`JsonReader`)."""
    if len(text) > MAX_CALL_CHARS or parse_work(text, syntax.name) > MAX_PARSE_WORK:
        return []
    names = {tool["function"]["name"] for tool in tools}
    own = partial(_parse_json, repair=repair)
    for parse, given in ((syntax.parse, text), (syntax.parse, text.strip()), (own, text)):
        try:
            calls = [_call(each, names) for each in _listed(parse(given, tools))]
        except Exception:  # generated text, and a parser that may expect another format
            continue
        if calls:
            return calls
    return []


def parse_complete_json_calls(text: str, tools: ToolSchemas) -> tuple[list[ParsedCall], str]:
    """Return the JSON calls of ``tools`` at the start of ``text``, and the rest, for an answer that
    was cut off."""
    if len(text) > MAX_CALL_CHARS:
        return [], text
    names = {tool["function"]["name"] for tool in tools}
    body = _without_tags(text)
    calls: list[ParsedCall] = []
    end = 0
    try:
        for value, position in _json_values(body):
            calls += [_call(each, names) for each in _listed(value)]
            end = position
    except Exception:  # generated text
        pass
    return (calls, body[end:]) if calls else ([], text)


def with_plain_properties(tools: ToolSchemas) -> list[Mapping[str, Any]]:
    """Return ``tools`` with references replaced by the schemas of the arguments: parsers look up
    types and do not follow references."""

    def plain(schema: Any, root: Mapping[str, Any]) -> Any:
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        return schema if target is None else target

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
    """Return whether ``text`` is JSON that is cut off inside a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def add_to_beginning(start: str, piece: str) -> str:
    """Return ``start``, the beginning of an answer without whitespace, extended with ``piece``."""
    return start if len(start) > _LONGEST_BEGINNING else start + "".join(piece.split())


def may_become_json_calls(start: str) -> bool:
    """Return whether an answer that begins with ``start`` (see `add_to_beginning`) may consist of
    calls in JSON."""
    return any(known.startswith(start) or start.startswith(known) for known in _BEGINNINGS)


def _parse_json(text: str, tools: Any, *, repair: bool = False) -> list[Any]:
    """Return the items of consecutive JSON values, which may stand in a code fence."""
    text = _without_tags(text).rstrip().removesuffix(_PYTHON_END).rstrip()
    fence = _FENCE.match(text)
    if fence:
        # Stripped here, not in the expression: whitespace next to a lazy match takes quadratic
        # time.
        text = text[fence.end() :].removesuffix("```").strip()
    return [each for value, _ in _json_values(text, repair=repair) for each in _listed(value)]


def _without_tags(text: str) -> str:
    text = text.lstrip()
    for tag in (*_PYTHON_TAGS, _PYTHON_END):
        text = text.removeprefix(tag)
    return text.lstrip()


def _json_values(text: str, *, repair: bool = False) -> Iterator[tuple[Any, int]]:
    """Yield each JSON value of ``text`` with the position of the next one. Raises `ValueError` for
    text that is not JSON."""
    decoder, position = json.JSONDecoder(), 0
    repairs = _MAX_REPAIRS if repair else 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except ValueError:
            if not repairs:
                raise
            repairs -= 1
            value, position = _repaired_value(text, position)
        space = _BETWEEN.match(text, position)
        position = space.end() if space else position
        yield value, position


def _repaired_value(text: str, position: int) -> tuple[Any, int]:
    reader = JsonReader()
    passed, rest = reader.feed(text[position:])
    return json.loads(passed + reader.finish()), len(text) - len(rest)


JSON = ToolSyntax("json", "", "", _parse_json)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call(parsed: Any, names: Collection[str]) -> ParsedCall:
    """Return ``parsed`` as a call. Raises if it does not call one of ``names``."""
    function = parsed.get("function")
    inner = function if isinstance(function, dict) else parsed
    name: Any = inner.get("name", function if isinstance(function, str) else None)
    name = name if name in names else str(name).removeprefix("functions.")
    if name not in names:
        raise ValueError(f"no tool {name!r}")
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):
        arguments = (
            json.loads(repaired(arguments.strip()) or arguments) if arguments.strip() else {}
        )
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    call_id = parsed.get("id")
    return ParsedCall(name, _json(arguments), (isinstance(call_id, str) and call_id) or None)


def _json(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an escape for half a surrogate pair
        text = json.dumps(arguments, allow_nan=False)
    return text
