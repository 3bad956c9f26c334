"""JSON as models write it, with repair of unambiguous errors."""

from __future__ import annotations

import json
import re

_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r'[^\s,:\[\]{}"]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {each: each for each in ("true", "false", "null")} | {
    "True": "true",
    "False": "false",
    "None": "null",
}
_MAX_SCALAR_CHARS = 1000
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")


class JsonReader:
    """Passes through one JSON object or array as it arrives.

    It repairs a comma before a closing bracket; line breaks and other control characters inside a
    string; ``True``, ``False`` and ``None``; and missing closing brackets at the end. Any other
    invalid text makes it `broken`, and is passed through unchanged.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []  # stack of open objects and arrays
        self._expected = "value"  # or: key, colon, comma
        self._may_close = False  # whether the innermost bracket may close here
        self._in_string = False
        self._comma = ""  # a comma held back, with the whitespace after it
        self._held = ""  # the start of an escape or a scalar
        self.complete = False
        self.broken = False

    @property
    def in_string(self) -> bool:
        """Whether the next text is in a string, as far as known."""
        return self._in_string and not self.broken

    def feed(self, text: str) -> tuple[str, str]:
        """Return the text that is final now, and the text after the end of the JSON."""
        text, self._held = self._held + text, ""
        out: list[str] = []
        position = 0
        while position < len(text) and not (self.complete or self.broken or self._held):
            step = self._string_step if self._in_string else self._step
            position = step(text, position, out)
        if self.broken:
            out += self._comma, text[position:]
            self._comma, position = "", len(text)
        return "".join(out), text[position:] if self.complete else ""

    def finish(self) -> str:
        """Return the rest at the end of the text, closing open brackets if possible."""
        out: list[str] = []
        if not (self.complete or self.broken):
            held, self._held = self._held, ""
            self.broken = self._in_string or not (held == "" or self._scalar(held, out))
            if self._closers and self._may_close and not self.broken:
                out += reversed(self._closers)
                self.complete = True
            else:
                self.broken = True
                out += self._comma, held
        return "".join(out)

    def _string_step(self, text: str, position: int, out: list[str]) -> int:
        if found := _PLAIN.match(text, position) or _ESCAPE.match(text, position):
            out.append(found[0])
            return found.end()
        char = text[position]
        if char == '"':
            self._in_string = False
        elif char == "\\":
            if _BEGUN_ESCAPE.match(text, position):
                self._held = text[position:]
            else:
                self.broken = True
            return position
        out.append(char if char == '"' else json.dumps(char)[1:-1])
        return position + 1

    def _step(self, text: str, position: int, out: list[str]) -> int:
        if found := _SPACE.match(text, position):
            if self._comma:
                self._comma += found[0]
            else:
                out.append(found[0])
            return found.end()
        char = text[position]
        if char in "}]":
            if not (self._may_close and self._closers and self._closers[-1] == char):
                self.broken = True
                return position
            out += self._comma[1:], char
            self._comma = ""
            self._closers.pop()
            self._after_value()
            self.complete = not self._closers
            return position + 1
        if char == "," and self._expected == "comma":
            self._comma = char
            self._expected = "key" if self._closers[-1] == "}" else "value"
            return position + 1
        return self._token(char, text, position, out)

    def _token(self, char: str, text: str, position: int, out: list[str]) -> int:
        """Read a character other than whitespace, a comma or a closing bracket."""
        if char == '"' and self._expected in ("key", "value"):
            self._in_string = True
            if self._expected == "key":
                self._expected, self._may_close = "colon", False
            else:
                self._after_value()
        elif char == ":" and self._expected == "colon":
            self._expected = "value"
        elif char in "{[" and self._expected == "value":
            self._closers.append("}" if char == "{" else "]")
            self._expected = "key" if char == "{" else "value"
            self._may_close = True
        else:
            found = _SCALAR.match(text, position)
            if found is None or not self._closers or found.end() - position > _MAX_SCALAR_CHARS:
                self.broken = True
                return position
            if found.end() == len(text):
                self._held = found[0]
                return found.end()
            self.broken = not self._scalar(found[0], out)
            return position if self.broken else found.end()
        out += self._comma, char
        self._comma = ""
        return position + 1

    def _scalar(self, text: str, out: list[str]) -> bool:
        """Add a number or literal. Return False if ``text`` is neither, or is not allowed here."""
        known = text if _NUMBER.fullmatch(text) else _LITERALS.get(text)
        if known is None or self._expected != "value":
            return False
        out += self._comma, known
        self._comma = ""
        self._after_value()
        return True

    def _after_value(self) -> None:
        self._expected, self._may_close = "comma", True


def repaired(text: str) -> str | None:
    """Return ``text``, an object or array, as valid JSON; None if it cannot be repaired."""
    reader = JsonReader()
    passed, rest = reader.feed(text)
    passed += reader.finish()
    return None if reader.broken or rest.strip() else passed
