"""Values as models write them, read as they arrive and passed on as JSON.

Errors that can mean one thing only are repaired.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import regex

from router.tokens.detokenizer import partial_match_length
from router.tokens.parsing.json_quoting import quoted_string

_SPACE = regex.compile(r"[ \t\r\n]+")
_SCALAR = regex.compile(r'[^\s,:\[\]{}()"]+')
_NUMBER = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {each: each for each in ("true", "false", "null")} | {
    "True": "true",
    "False": "false",
    "None": "null",
}
_MAX_SCALAR_CHARS = 1000
_PLAIN = {
    quote: regex.compile(rf"[^{quote}\\\x00-\x1f]+" if quote == '"' else r"[^'\"\\\x00-\x1f]+")
    for quote in "\"'"
}
_ESCAPE = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PYTHON_ESCAPE = regex.compile(
    r"\\(?:x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|[0-7]{1,3}|N\{[^{}]{1,64}\}|[av\n])"
)
_BARE = regex.compile(
    r"""(?:[^][(){},'"]++|(?P<text>'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")
    |(?P<group>[([{](?:[^][(){}'"]++|(?&text)|(?&group))*+[])}]))*+""",
    regex.VERBOSE | regex.DOTALL,
)
"""A value without quotes, such as a word or an expression."""
_KEYWORD = regex.compile(r"(?P<key>[^][(){},='\"]{1,256}?)\s*=(?!=)")
_BARE_KEY = regex.compile(r"(?P<key>[^][{},:\"]{1,256}?)\s*:")
_PLACE_ENDS = ",)]}"


class Style(NamedTuple):
    """How a model writes values. Only JSON's whitespace is kept."""

    quotes: tuple[str, ...] = ('"',)
    """Text between quotes of more than one character has no escapes."""
    python: bool = False
    """Whether the escapes and tuples of Python occur, and the arguments of a call in
    parentheses."""
    bare: bool = False
    """Whether keys and text may lack quotes."""


JSON_STYLE = Style()
PYTHON_VALUES = Style(('"', "'"), python=True)
PYTHON_CALLS = Style(('"', "'"), python=True, bare=True)


@dataclass
class _Frame:
    """An open object or array."""

    closer: str
    shown: str  # the closing bracket in JSON; empty: its members are those of the outer object
    is_object: bool
    filled: bool = False


class JsonReader:
    """Passes on one value as it arrives.

    It repairs a comma before a closing bracket; line breaks and other control characters inside a
    string; backslashes that escape nothing; ``True``, ``False`` and ``None``; and missing closing
    brackets, at the end and before any of ``stops``. Any other invalid text makes it `broken`, and
    is passed on unchanged up to a stop, without the bracket ``outer`` of what contains it.
    ``names`` are those of the arguments: a key may be left out, or contain a colon.
    """

    def __init__(
        self,
        style: Style = JSON_STYLE,
        *,
        stops: Sequence[str] = (),
        names: Sequence[str] = (),
        outer: str = "",
    ) -> None:
        self._style = style
        self._stops = tuple(filter(None, stops))
        self._names = list(names)
        self._known = [f"{key}:" for key in sorted(names, key=len, reverse=True) if ":" in key]
        self._outer = outer
        self._frames: list[_Frame] = []
        self._expected = "value"  # or: key, colon, comma
        self._may_close = False  # whether the innermost bracket may close here
        self._quote = ""  # of the open string
        self._comma = ""  # a comma held back, with the whitespace after it
        self._held = ""  # text that more text decides
        self._ended = False  # whether no more text follows
        self.complete = False
        self.broken = False
        self.out: list[str] = []
        """The text that is final, until the user takes it."""

    def feed(self, text: str) -> str | None:
        """Add ``text``. Return the text after the value, or None if it continues."""
        text, self._held = self._held + text, ""
        position = 0
        while position < len(text) and not (self.complete or self.broken or self._held):
            position = self._read(text, position)
        if self.broken:
            return self._pass_on(text[position:])
        return text[position:] if self.complete else None

    def finish(self, *, cut: bool = False) -> str:
        """End the value at the end of the text, with open brackets closed if possible, unless the
        text was ``cut``. Return the text after it."""
        if cut:
            return ""
        self._ended = True
        rest = self.feed("")
        if not (self.complete or self.broken):
            self._mend()
            if self.broken:
                self._pass_on(self._held)
        return rest or ""

    def take(self) -> str:
        """Return the text that became final since the last call."""
        taken = "".join(self.out)
        self.out.clear()
        return taken

    def _read(self, text: str, position: int) -> int:
        if not self._quote:
            return self._step(text, position)
        if len(self._quote) > 1:
            return self._raw_step(text, position)
        return self._string_step(text, position)

    def _pass_on(self, text: str) -> str | None:
        """Pass on invalid text up to a stop, without the brackets of what surrounds it."""
        self.out.append(self._comma)
        self._comma = self._held = ""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        end = min(places, default=len(text))
        stopped = bool(places) or self._ended
        if stopped:
            end = len(text[:end].rstrip().removesuffix(self._outer).rstrip())
            self.complete = True
        else:
            end -= partial_match_length(text, self._stops)
            end = len(text[:end].rstrip(" \t\r\n}]"))
            self._held = text[end:]
        self.out.append(text[:end])
        return text[end:] if stopped else None

    def _mend(self) -> None:
        """Close what is open, or be broken."""
        if self._quote and len(self._quote) > 1:
            self.out.append('"')
            self._quote = ""
            self._expected, self._may_close = "comma", True
        if self._quote or not (self._frames and self._may_close):
            self.broken = True
            return
        self.out += [frame.shown for frame in reversed(self._frames)]
        self._frames.clear()
        self._comma = self._held = ""
        self.complete = True

    # -- text ----------------------------------------------------------------------

    def _string_step(self, text: str, position: int) -> int:
        if found := _PLAIN[self._quote].match(text, position) or _ESCAPE.match(text, position):
            self.out.append(found[0])
            return int(found.end())
        char = text[position]
        if char == "\\":
            return self._escape(text, position)
        if char == self._quote:
            self._end_text()
        else:
            self.out.append(json.dumps(char)[1:-1])
        return position + 1

    def _end_text(self) -> None:
        self._quote = ""
        self.complete = not self._frames
        self.out.append('"')

    def _escape(self, text: str, position: int) -> int:
        """Read an escape that JSON does not have, or the start of one."""
        longest = 66 if self._style.python else 6
        if len(text) - position < longest and not self._ended:
            known = (_ESCAPE, _PYTHON_ESCAPE) if self._style.python else (_ESCAPE,)
            if any((m := each.match(text, position, partial=True)) and m.partial for each in known):
                self._held = text[position:]
                return position
        if self._style.python and (found := _PYTHON_ESCAPE.match(text, position)):
            try:
                self.out.append(
                    json.dumps(ast.literal_eval(f'"{found[0]}"'), ensure_ascii=False)[1:-1]
                )
                return int(found.end())
            except (ValueError, SyntaxError):
                pass
        if text[position + 1 : position + 2] == "'":
            self.out.append("'")
            return position + 2
        self.out.append("\\\\")
        return position + 1

    def _raw_step(self, text: str, position: int) -> int:
        place = text.find(self._quote, position)
        if place < 0:
            end = len(text) - partial_match_length(text[position:], [self._quote])
            self.out.append(quoted_string(text[position:end]))
            self._held = text[end:]
            return end
        self.out.append(quoted_string(text[position:place]))
        after = place + len(self._quote)
        follows = self._follows(text, after)
        if follows is None and not self._ended:
            self._held = text[place:]
            return place
        if follows is False:
            self.out.append(quoted_string(self._quote))
            return after
        self._end_text()
        return after

    def _follows(self, text: str, position: int) -> bool | None:
        """Return whether the text after a quote may follow a string; None if more text decides."""
        if self._expected == "colon":
            expected = r"\s*+:"
        elif self._frames and self._frames[-1].is_object:
            quotes = "|".join(map(regex.escape, self._style.quotes))
            expected = rf"\s*+(?:\}}|,\s*+(?:{quotes}|[^][{{}},:\"]{{1,256}}?:))"
        else:
            expected = r"\s*+[],]"
        stops = "|".join(map(regex.escape, self._stops))
        if stops:
            expected = rf"{expected}|\s*+(?:{stops})"
        found = regex.match(expected, text, pos=position, partial=True)
        if found is None:
            return False
        return None if found.partial else True

    # -- everything else -----------------------------------------------------------

    def _step(self, text: str, position: int) -> int:
        if found := _SPACE.match(text, position):
            if self._style is JSON_STYLE:
                if self._comma:
                    self._comma += found[0]
                else:
                    self.out.append(found[0])
            return int(found.end())
        char = text[position]
        if self._stops and self._frames and self._may_close:
            if any(text.startswith(stop, position) for stop in self._stops):
                self._mend()
                return position
            rest = text[position : position + max(map(len, self._stops))]
            if not self._ended and any(stop.startswith(rest) for stop in self._stops):
                self._held = text[position:]
                return position
        if char in ")]}":
            return self._close(char, position)
        if char == "," and self._expected == "comma":
            self._comma = char
            self._expected = "key" if self._frames[-1].is_object else "value"
            return position + 1
        if char == ":" and self._expected == "colon":
            self._expected = "value"
            self.out.append(":" if self._style is JSON_STYLE else ": ")
            return position + 1
        if self._expected == "key":
            return self._key(char, text, position)
        if self._expected == "value":
            return self._value(char, text, position)
        self.broken = True
        return position

    def _close(self, char: str, position: int) -> int:
        frame = self._frames[-1] if self._frames else None
        if frame is not None and self._expected == "value" and self._style.bare and frame.is_object:
            self.out.append('""')  # a key without a value
            self._after_value()
        if frame is None or not self._may_close or frame.closer != char:
            self.broken = True
            return position
        if self._style is JSON_STYLE:
            self.out.append(self._comma[1:])
        self.out.append(frame.shown)
        self._comma = ""
        self._frames.pop()
        if not frame.shown:
            self._frames[-1].filled |= frame.filled
        self._after_value()
        return position + 1

    def _key(self, char: str, text: str, position: int) -> int:
        frame = self._frames[-1]
        if (end := self._opening_quote(char, text, position)) is not None and frame.closer == "}":
            if end > position:
                self._begin('"')
                self._quote, self._expected = text[position:end], "colon"
                self._may_close = False
            return end
        if not self._style.bare:
            self.broken = True
            return position
        if frame.closer == ")" and text.startswith("**", position):
            brace = text.find("{", position)
            if brace < 0:
                self._held = text[position:]
                return position
            self._frames.append(_Frame("}", "", True, frame.filled))
            return brace + 1
        key = self._bare_key(frame, text, position)
        if key is None:
            self._held = text[position:] if not self._ended else ""
            self.broken = self._ended
            return position
        name, end = key
        if end == position and not name:
            self.broken = True
            return position
        self._begin(json.dumps(name, ensure_ascii=False) + ": ")
        self._expected, self._may_close = "value", False
        return end

    def _bare_key(self, frame: _Frame, text: str, position: int) -> tuple[str, int] | None:
        """Return the key without quotes, and the end of what separates it from its value; the next
        argument's name if it has none. None if more text decides, empty if there is no key."""
        if frame.closer == "}":
            for name in self._known:
                if text.startswith(name, position):
                    return name[:-1], position + len(name)
                if not self._ended and name.startswith(text[position : position + len(name)]):
                    return None
            found = _BARE_KEY.match(text, position, partial=True)
        else:
            found = _KEYWORD.match(text, position, partial=True)
        if found is None:
            if frame.closer == ")" and self._names:
                return self._names.pop(0), position
            return "", position
        if found.partial:
            return None
        key = found["key"].strip()
        if key in self._names:
            self._names.remove(key)
        return key, found.end()

    def _value(self, char: str, text: str, position: int) -> int:
        if (end := self._opening_quote(char, text, position)) is not None:
            if end > position:
                self._begin('"')
                self._quote = text[position:end]
                self._after_value()
            return end
        if char in "{[" or (char == "(" and self._style.python):
            is_call = char == "(" and not self._frames
            is_object = is_call or char == "{"
            self._begin("{" if is_object else "[")
            closer = {"{": "}", "[": "]", "(": ")"}[char]
            self._frames.append(_Frame(closer, "}" if is_object else "]", is_object))
            self._expected = "key" if is_object else "value"
            self._may_close = True
            return position + 1
        pattern = _BARE if self._style.bare else _SCALAR
        found = pattern.match(text, position)
        end = found.end() if found else position
        stops = [each for stop in self._stops if (each := text.find(stop, position)) >= 0]
        if min(stops, default=end) < end:
            end = min(stops)
        elif end == len(text) or (self._style.bare and text[end] not in _PLACE_ENDS):
            self._held = text[position:] if len(text) - position <= _MAX_SCALAR_CHARS else ""
        if self._held and not self._ended:
            return position
        self._held = ""
        if end == position or end - position > _MAX_SCALAR_CHARS:
            self.broken = True
            return position
        self.broken = not self._scalar(text[position:end].strip())
        return position if self.broken else end

    def _scalar(self, text: str) -> bool:
        """Add a number, a literal, or text without quotes. Return False if it is none."""
        known = text if _NUMBER.fullmatch(text) else _LITERALS.get(text)
        if known is None and self._style.python:
            known = _python_number(text)
        if known is None and self._style.bare:
            known = json.dumps(text, ensure_ascii=False)
        if known is None:
            return False
        self._begin(known)
        self._after_value()
        return True

    def _opening_quote(self, char: str, text: str, position: int) -> int | None:
        """Return the end of a quote that opens here, and ``position`` if more text decides."""
        for quote in self._style.quotes:
            if quote[0] == char and text.startswith(quote, position):
                return position + len(quote)
        rest = text[position:]
        if any(quote.startswith(rest) for quote in self._style.quotes) and not self._ended:
            self._held = rest
            return position
        return None

    def _begin(self, text: str) -> None:
        """Add the start of a member or value, after the comma that was held back."""
        if self._style is JSON_STYLE:
            self.out.append(self._comma)
        elif self._comma and self._frames and self._frames[-1].filled:
            self.out.append(", ")
        self._comma = ""
        if self._frames:
            self._frames[-1].filled = True
        self.out.append(text)

    def _after_value(self) -> None:
        self._expected, self._may_close = "comma", True
        self.complete = not self._frames and not self._quote


def _python_number(text: str) -> str | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return json.dumps(value) if is_number else None


def repaired(text: str) -> str | None:
    """Return ``text``, an object or array, as valid JSON; None if it cannot be repaired."""
    reader = JsonReader()
    rest = reader.feed(text)
    rest = reader.finish() if rest is None else rest
    passed = reader.take()
    return None if reader.broken or rest.strip() or passed[:1] not in ("{", "[") else passed
