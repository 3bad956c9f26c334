"""Calls with each argument between tags of its own, as text without quotes or escapes."""

from __future__ import annotations

import ast
import html
import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from router.schemas.value_schema import ValueSchema
from router.tokens.detokenizer import partial_match_length
from router.tokens.parsing.json_quoting import quoted_string
from router.tokens.parsing.json_reader import PYTHON_VALUES, JsonReader

KEY = r"(?P<key>[^<>\"']{1,256}?)"
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_MAX_UNDECIDED_CHARS = 1000
_MAX_SPACES = 256
"""Max number of whitespace characters between a closing tag and what shows that it closes."""
_OTHER_THAN_TEXT = {
    "null": r"\s*+(?:null|None)\s*+",
    "boolean": r"\s*+(?:true|false|True|False)\s*+",
    "integer": r"\s*+[-+]?[0-9._eE+-]*+\s*+",
    "number": r"\s*+[-+]?[0-9._eE+-]*+\s*+",
    "array": r"\s*+\[(?s:.)*+",
    "object": r"\s*+\{(?s:.)*+",
    "quoted": r'\s*+"(?s:.)*+',
    "element": "ELEMENT(?s:.)*+",
}
"""How a value begins that may be of another type than text."""


class Tags(NamedTuple):
    """The tags of arguments. Their values have no escapes."""

    argument: str = ""
    """An expression for the text before a value, with `KEY`. Its group ``kind`` says whether the
    value is text; without the group, the schema does."""
    close: str = ""
    """The text after a value, with ``{key}`` for its name."""
    end: str = ""
    """The text after the arguments; empty if the marker after calls ends them."""
    breaks: bool = False
    """Whether a line break next to a value belongs to the tags."""
    cdata: bool = False
    """Whether a value may stand in a CDATA section."""
    guesses: bool = False
    """Whether a value without a type in the schema is JSON if it can be. Otherwise only objects
    and lists are."""
    element: str = ""
    """What precedes the tags of a value's own elements."""


class _Patterns:
    """The expressions for ``tags`` in a section that ends with one of ``stops``."""

    def __init__(self, tags: Tags, stops: tuple[str, ...]) -> None:
        end, ends = regex.escape(tags.end) or "(?!)", "|".join(map(regex.escape, stops)) or "(?!)"
        self.argument = regex.compile(r"\s*+" + tags.argument)
        self.end = regex.compile(rf"\s*+(?:(?P<own>{end})|{ends})")
        closing = rf"{end}(?:\s*+(?P<stop>{ends}))?+|(?P<only>{ends})"
        self.follows = regex.compile(
            rf"\s{{0,{_MAX_SPACES}}}+(?:{tags.argument}|(?P<end>{closing}))"
        )
        self.tail = regex.compile(rf"(?:{end}\s*+)?(?:{ends})?\s*+")
        starts = {each[:1] for each in (tags.close, tags.end, *stops)}
        starts |= {"\r", "\n"} if tags.breaks else set()
        starts |= {_CDATA_END[0]} if tags.cdata else set()
        self.starts = re.compile(f"[{re.escape(''.join(sorted(starts)))}]")


_patterns = lru_cache(maxsize=64)(_Patterns)


class TaggedArguments:
    """Reads the arguments of one call up to its end.

    Nothing is escaped, so a closing tag ends a value only if what follows may follow it: an
    argument that the call does not have yet, the end of the call, or the end of the calls, unless
    yet another closing tag follows that. Text is passed on as it arrives; other values when they
    are complete.
    """

    def __init__(self, tags: Tags, schema: ValueSchema, stops: Sequence[str]) -> None:
        self._tags, self._schema, self._stops = tags, schema, tuple(filter(None, stops))
        self._patterns = _patterns(tags, self._stops)
        self._buffer = ""
        self._ended = False  # whether no more text follows
        self.complete = False
        self._keys: set[str] = set()
        self._key: str | None = None  # of the open value
        self._value = schema  # the schema of the open value
        self._guesses = tags.guesses  # whether the open value is JSON if it can be
        self._is_text: bool | None = None  # None: the schema decides
        self._close = ""  # the text after the open value
        self._position = 0  # where the search for that text goes on
        self._mode = ""  # of the open value: new, undecided, text, held, json, read
        self._line_break = ""  # before the open value
        self._json = JsonReader()
        self.out: list[str] = []

    @property
    def num_held(self) -> int:
        return len(self._buffer)

    def feed(self, text: str) -> str | None:
        """Add ``text``. Return the text after the call, or None if it continues."""
        self._buffer += text
        while not self.complete:
            if not (self._read_between() if self._key is None else self._read_value()):
                return None
        rest, self._buffer = self._buffer, ""
        return rest

    def finish(self, *, cut: bool) -> str:
        """End the call at the end of the answer, and return the text after it. If the answer was
        ``cut``, the call ends only if it was complete."""
        if cut and self._mode in ("new", "undecided"):
            return ""
        self._ended = True
        if (rest := self.feed("")) is not None or cut:
            return rest or ""
        if self._key is not None:
            value, self._buffer = self._buffer, ""
            for end in (*self._stops, self._tags.end, self._close):  # such as those without a start
                if end and value.rstrip().endswith(end):
                    value = value.rstrip().removesuffix(end)
            self._end_value(value)
        rest, self._buffer = self._buffer, ""
        self._end_call()
        return rest

    # -- outside of values ---------------------------------------------------------

    def _read_between(self) -> bool:
        """Read the start of an argument, or the end of the call. Return False if more text is
        needed."""
        partial = not self._ended
        opening = self._patterns.argument.match(self._buffer, partial=partial)
        if opening is not None and not opening.partial:
            self._begin_value(opening)
            return True
        end = self._patterns.end.match(self._buffer, partial=partial)
        if end is not None and not end.partial:
            self._buffer = self._buffer[max(0, end.end("own")) :]
        elif opening is not None or end is not None or self._ended:
            if self._buffer.isspace():
                self._buffer = ""  # a long run would be read again for each piece
            return False
        self._end_call()
        return True

    def _end_call(self) -> None:
        self.complete = True
        self.out.append("}" if self._keys else "{}")

    def _begin_value(self, opening: regex.Match[str]) -> None:
        key, kind = opening["key"], opening.groupdict().get("kind")
        self._close = self._tags.close.replace("{key}", key)
        self._buffer = self._buffer[opening.end() :]
        self._key = key = html.unescape(key.strip()) if kind else key.strip()
        self._value = self._schema.member(key)
        self._guesses = self._tags.guesses or self._schema.is_free(key)
        self._is_text = None if kind is None else kind in ("true", "string")
        self._line_break, self._mode, self._position = "", "new", 0
        self.out.append(("{" if not self._keys else ", ") + _json(key) + ": ")
        self._keys.add(key)

    # -- values --------------------------------------------------------------------

    def _read_value(self) -> bool:
        """Return False if more text is needed."""
        if self._mode == "new" and not self._ended and self._may_begin():
            return False
        if self._mode == "new":
            self._begin_text()
        if self._mode == "undecided":
            self._mode = self._decided_mode()
            if self._mode == "undecided":
                return False
            if self._mode == "text":
                self.out.append('"')
            if self._mode == "json":
                self._json = JsonReader(PYTHON_VALUES, stops=[self._close])
        if self._mode == "json":
            self._buffer = self._json.feed(self._buffer) or ""
            self.out.append(self._json.take())
            if not self._json.complete:
                return False
            self._mode = "read"
        place = self._end_of_value()
        if place is None:
            return False
        value, self._buffer = self._buffer[:place], self._buffer[place + len(self._close) :]
        self._end_value(value)
        return True

    def _may_begin(self) -> bool:
        """Return whether more text decides what is before the value."""
        text = self._buffer
        if self._tags.breaks and text in ("", "\r"):
            return True
        return (
            self._tags.cdata
            and _CDATA.startswith(text.lstrip()[: len(_CDATA)])
            and (len(text.lstrip()) < len(_CDATA) and len(text) < _MAX_UNDECIDED_CHARS)
        )

    def _begin_text(self) -> None:
        self._mode = "undecided"
        if self._tags.breaks:
            breaks = (each for each in ("\r\n", "\n") if self._buffer.startswith(each))
            self._line_break = next(breaks, "")
            self._buffer = self._buffer[len(self._line_break) :]
        if self._tags.cdata and (text := self._buffer.lstrip()).startswith(_CDATA):
            self._buffer = text[len(_CDATA) :]
            self._close = _CDATA_END + self._close

    def _decided_mode(self) -> str:
        """Return how the value is read, or that more text decides."""
        types, text = self._value.types, self._buffer
        start = text.lstrip()[:1]
        if self._is_text or (self._is_text is None and types == {"string"}):
            return "text"
        if self._is_text is False or (types and "string" not in types):
            if not start and not self._ended:
                return "undecided"
            is_json = start in ("{", "[")
            return "json" if is_json and types <= {"object", "array"} else "held"
        if self._ended:
            return "held"
        place = text.find(self._close)
        if place < 0:
            place = len(text) - partial_match_length(text, [self._close])
        body, closes = text[:place], place < len(text)
        others = types - {"string"} if types else {"array", "object"}
        if self._guesses and not types:
            others |= {"null", "boolean", "number", "quoted"}
        if self._tags.element:
            others |= {"element"}
        for each in others & _OTHER_THAN_TEXT.keys():
            pattern = _OTHER_THAN_TEXT[each].replace("ELEMENT", regex.escape(self._tags.element))
            found = regex.fullmatch(pattern, body, partial=True)
            if found is None:
                continue
            is_long = each in ("array", "object", "quoted", "element")
            if (closes or is_long) and not found.partial:
                return "held"
            if not closes and len(body) < _MAX_UNDECIDED_CHARS:
                return "undecided"
        return "text"

    def _end_of_value(self) -> int | None:
        """Return where the text after the value is, None if it is not there or if more text
        decides. Text is passed on up to there."""
        if self._mode == "text" and self._patterns.starts.search(self._buffer) is None:
            self.out.append(_quoted(self._buffer))
            self._buffer, self._position = "", 0
            return None
        while (place := self._buffer.find(self._close, self._position)) >= 0:
            ends = self._ends_at(place + len(self._close))
            if ends or (ends is None and self._ended):
                return place
            self._position = place
            if ends is None:
                break
            self._position += 1
        if self._mode == "text":
            self._pass_on(place)
        elif place < 0:
            self._position = max(self._position, len(self._buffer) - len(self._close) + 1)
        return None

    def _ends_at(self, position: int) -> bool | None:
        """Return whether a value ends with the closing tag before ``position``; None if more text
        decides."""
        found = self._patterns.follows.match(self._buffer, position, partial=True)
        if found is None or found.partial:
            return None if found else False
        if found["end"] is None:
            return found["key"].strip() not in self._keys
        after = self._buffer[found.end() : found.end() + _MAX_SPACES]
        if len(after) == _MAX_SPACES and after.isspace():
            return True
        after = after.lstrip()
        closers = (self._close.removeprefix(_CDATA_END), self._tags.end)
        if any(each and after.startswith(each) for each in closers):
            return False  # a whole call, as text
        ended = found["stop"] or found["only"]
        expected = filter(None, closers if ended else (*closers, *self._stops))
        return None if any(each.startswith(after) for each in expected) else True

    def _pass_on(self, place: int) -> None:
        """Pass on the text before the closing tag at ``place`` that belongs to no tag; if there is
        none, what cannot be the start of a tag."""
        buffer, marks = self._buffer, [self._close, *filter(None, (self._tags.end, *self._stops))]
        end = place
        if place < 0:
            end = len(buffer) - partial_match_length(buffer, marks)
            for mark in marks[1:]:
                place = buffer.find(mark, self._position)
                while 0 <= place < end:
                    if self._patterns.tail.fullmatch(buffer, place, partial=True):
                        end = place
                    place = buffer.find(mark, place + 1)
        if self._tags.breaks:
            if buffer.endswith("\n", 0, end):
                end -= 1
            if self._line_break == "\r\n" and buffer.endswith("\r", 0, end):
                end -= 1
        if end > 0:
            self.out.append(_quoted(buffer[:end]))
            self._buffer = buffer[end:]
            self._position = max(0, self._position - end)

    def _end_value(self, value: str) -> None:
        if self._tags.breaks:
            before = value
            value = value.removesuffix("\n")
            if value != before and self._line_break == "\r\n":
                value = value.removesuffix("\r")
        self._key, mode, self._mode = None, self._mode, ""
        if mode == "text":
            self.out.append(_quoted(value) + '"')
        elif mode == "json":
            self._json.finish()
            self.out.append(self._json.take())
        elif mode != "read":
            self.out.append(_json(self._read(value)))

    def _read(self, text: str) -> Any:
        """Return the value that ``text`` stands for."""
        if self._is_text is not None:
            return text if self._is_text else decoded(text)
        if self._tags.element:
            return _element(text, self._value, self._tags.element)
        return typed(text, self._value, guesses=self._guesses)


def typed(text: str, schema: ValueSchema, *, guesses: bool) -> Any:
    """Return the value of ``text`` that has a type of ``schema``. With ``guesses``, a value without
    a type is JSON if it can be; otherwise only if it is an object or a list."""
    types, value = schema.types, decoded(text)
    if text.strip() == "None" and "null" in types:  # so some templates write null
        return None
    if "string" in types:
        return value if schema.names_type_of(value) else text
    if not types and not guesses:
        return value if isinstance(value, dict | list) else text
    if isinstance(value, str):
        value = _python_value(text)
    if isinstance(value, float) and not math.isfinite(value):
        return text.strip()
    if isinstance(value, float) and value.is_integer() and not schema.names_type_of(value):
        return int(value)
    return value


def decoded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _finite(text: str) -> float:
    """Return a number. Raises `ValueError` for numbers that JSON does not support."""
    if not math.isfinite(number := float(text)):
        raise ValueError("not finite")
    return number


def _python_value(text: str) -> Any:
    """Return the value that ``text`` has in Python, such as True; the text if it has none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


def _quoted(text: str) -> str:
    written = quoted_string(text)
    try:
        written.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        written = json.dumps(text)[1:-1]
    return written


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # an escape for half a surrogate pair
        return json.dumps(value)
    except (TypeError, ValueError):  # such as a set, or a number that is not finite
        return json.dumps(str(value), ensure_ascii=False)
    return text


# -- elements within values --------------------------------------------------------

_TAG = regex.compile(r"<(?P<end>/?)(?P<tag>[^<>\s]+)>")


class _Element(NamedTuple):
    tag: str
    text: str
    children: list[_Element]


def _element(text: str, schema: ValueSchema, mark: str) -> Any:
    """Return the value of ``text``, which may consist of elements whose tags ``mark`` precedes."""
    root = _Element("", text.partition(mark)[0], [])
    opened = [root]
    for piece in text.split(mark)[1:]:
        tag = _TAG.match(piece)
        if tag is None or (tag["end"] and opened[-1].tag != tag["tag"]):
            return text
        if tag["end"]:
            opened.pop()
            continue
        element = _Element(tag["tag"], piece[tag.end() :], [])
        opened[-1].children.append(element)
        opened.append(element)
    return _element_value(root, schema) if opened == [root] else text


def _members(element: _Element, schema: ValueSchema) -> dict[str, Any]:
    members: dict[str, list[Any]] = {}
    for child in element.children:
        value = _element_value(child, schema.member(child.tag))
        members.setdefault(child.tag, []).append(value)
    return {tag: values[0] if len(values) == 1 else values for tag, values in members.items()}


def _element_value(element: _Element, schema: ValueSchema) -> Any:
    types = schema.types
    if element.children:
        may_be_list = "array" in types or "object" not in types
        if may_be_list and all(child.tag == "item" for child in element.children):
            return [_element_value(child, schema.items) for child in element.children]
        return _members(element, schema)
    if "string" not in types and not element.text.strip():
        if "array" in types:
            return []
        if "object" in types:
            return {}
    return typed(element.text, schema, guesses=True)
