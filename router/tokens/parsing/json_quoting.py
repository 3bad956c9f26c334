"""Expressions for text inside the quotes of a JSON string.

A grammar describes plain text, but most models write that text into the JSON of a call. There,
quotes, backslashes and control characters are escapes of two or six characters.
"""

from __future__ import annotations

import json
from functools import lru_cache

import regex

from router.errors import InvalidRequest

_ESCAPED = '\b\t\n\f\r"\\'
"""Characters with a short escape. Other control characters are only matched unescaped."""
_ALL_ESCAPED = '"\\' + "".join(map(chr, range(0x20)))
_PLAIN = r'["\\\x00-\x1f]'
"""The class of characters that JSON escapes, in Rust's regex syntax."""
QUOTED_TEXT = r'(?:[^"\\\x00-\x1f]|\\["\\bfnrt])*'
"""An expression for any text."""

_PIECE = regex.compile(
    r"""(?P<many>\\[dDwWsS] | \\[pP](?:\{[^}]*\}|.) | \.)
    | (?P<one>\\x\{[0-9a-fA-F]+\} | \\[uU]\{[0-9a-fA-F]+\} | \\x[0-9a-fA-F]{2}
        | \\u[0-9a-fA-F]{4} | \\U[0-9a-fA-F]{8} | \\[^bBAzG<>] | ["\x00-\x1f])
    | (?P<flags>\(\?(?P<on>[a-zA-Z]*)(?P<off>-[a-zA-Z]*)?(?P<scope>[:)]))
    | (?P<class>\[) | (?P<open>\() | (?P<close>\)) | (?P<other>\\.|.)""",
    regex.VERBOSE | regex.DOTALL,
)
_CODE = regex.compile(r"\\[xuU]\{?0*([0-9a-fA-F]+)\}?")


def quoted_string(text: str) -> str:
    """Return ``text`` quoted for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted_regex(source: str, flags: str, param: str) -> str:
    """Return the expression for the quoted form of everything that ``source`` matches. Both are
    Rust's (https://docs.rs/regex/latest/regex/#syntax). Raises `InvalidRequest`."""
    if "x" in flags:
        raise _unknown("the flag x", param)
    dotall = ["s" in flags]  # by group
    out: list[str] = []
    position = 0
    while found := _PIECE.match(source, position):
        position = found.end()
        piece = found[0]
        match found.lastgroup:
            case "many" | "one":
                piece = _quoted(piece, dotall[-1], found.lastgroup == "one", param)
            case "class":
                position = end_of_class(source, found.start(), param)
                piece = _quoted(source[found.start() : position], False, False, param)
            case "flags" | "scope" | "on" | "off":
                if "x" in found["on"]:
                    raise _unknown("the flag x", param)
                set_here = (dotall[-1] or "s" in found["on"]) and "s" not in (found["off"] or "")
                if found["scope"] == ":":
                    dotall.append(set_here)
                else:
                    dotall[-1] = set_here
            case "open":
                dotall.append(dotall[-1])
            case "close":
                if len(dotall) > 1:
                    dotall.pop()
        out.append(piece)
    return "".join(out)


def end_of_class(source: str, start: int, param: str) -> int:
    """Return the end of the character class that begins at ``start``."""
    depth, position = 0, start
    while position < len(source):
        match source[position]:
            case "\\":
                position += 1
            case "[":
                depth += 1
                position += source[position + 1 : position + 2] == "^"
                position += source[position + 1 : position + 2] == "]"
            case "]":
                depth -= 1
                if depth == 0:
                    return position + 1
        position += 1
    raise _unknown(f"the class {source[start : start + 20]!r}, which is not closed,", param)


def _quoted(piece: str, dotall: bool, single: bool, param: str) -> str:
    """Return the expression for the quoted form of ``piece``, which matches one character."""
    try:
        matched = _escaped_matches(piece, dotall, _ALL_ESCAPED if single else _ESCAPED)
    except regex.error as error:
        raise _unknown(f"{piece[:40]!r} ({error})", param) from None
    if not matched:
        return piece
    escapes = "|".join(regex.escape(quoted_string(character)) for character in matched)
    if single:
        return f"(?-i:{escapes})"
    plain = r'[^"\\\x00-\x1f]' if piece == "." else f"[{piece}--{_PLAIN}]"
    return f"(?:{plain}|(?-i:{escapes}))"


@lru_cache(maxsize=1024)
def _escaped_matches(piece: str, dotall: bool, characters: str) -> str:
    """Return the ``characters`` that ``piece`` matches."""
    python = _CODE.sub(lambda found: rf"\U{int(found[1], 16):08x}", piece)
    pattern = regex.compile(python, regex.V1 | (regex.DOTALL if dotall else 0))
    return "".join(filter(pattern.fullmatch, characters))


def _unknown(what: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}': {what} is not supported in a regular expression for the input of a tool.",
        param=param,
    )
