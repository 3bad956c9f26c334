"""Grammars of a tool's input text, as parts of the grammar of its calls.

In most calls the text is inside a JSON string, so each terminal is converted to match the quoted
form of its text (`router.tokens.parsing.json_quoting`).

llguidance's lexer looks one byte ahead, but an escape has two bytes. It could not find the end of a
terminal that may continue with an escape and be followed by another escape, such as a line and its
escaped line break. Rules that are not recursive therefore become terminals, which are a single
expression without such ends. In other rules, a repeated class of characters becomes a rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from router.errors import InvalidRequest
from router.tokens.parsing.json_quoting import (
    QUOTED_TEXT,
    end_of_class,
    quoted_regex,
    quoted_string,
)
from router.tokens.parsing.lark_parts import within_slashes
from router.tokens.parsing.lark_source import (
    Definition,
    LarkPiece,
    definitions,
    regular_rules,
    wrong,
)
from shared.wire import Grammar

_IMPORTED = {
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*\/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of Lark's `common` that match characters that JSON escapes."""
_REPEATED = re.compile(r"([*+?]|\{[0-9,]+\})?\)?\Z")


def input_lark(grammar: Grammar, *, quoted: bool, end: str | None = None) -> str:
    """Return a nested grammar of the text of ``grammar``, ``quoted`` for a JSON string.

    ``end`` is the text that follows; its first occurrence ends the text. Raises `InvalidRequest`
    with the position.
    """
    source, param = grammar.source, grammar.param or ""
    if grammar.kind == "regex":
        source = f"start: /{within_slashes(source)}/"
    try:
        return _Converter(definitions(source, param), quoted, param).nested(end)
    except RecursionError:
        raise InvalidRequest(f"'{param}' is nested too deeply.", param=param) from None


class _Converter:
    def __init__(self, found: Sequence[Definition], quoted: bool, param: str) -> None:
        self._found = found
        self._quoted = quoted
        self._param = param
        # Whitespace may be ignored between the parts of a rule, but not inside a terminal.
        self._ignores = any(each.name == "%ignore" for each in found)
        self._regular = set() if self._ignores else regular_rules(found)
        self._prefix = "R_"
        while any(each.name.startswith(self._prefix) for each in found):
            self._prefix = "R" + self._prefix

    def nested(self, end: str | None) -> str:
        lines = [self._line(each) for each in self._found]
        if "start" in self._regular:
            suffix = "" if end is None else f"[suffix={json.dumps(end)}]"
            lines.insert(0, f"start{suffix}: {self._terminal('start')}")
            end = None
        nested = "%lark {\n" + "\n".join(lines) + "\n}"
        return nested if end is None else f"{nested} {json.dumps(end)}"

    def _terminal(self, rule: str) -> str:
        return self._prefix + rule.upper()

    def _line(self, each: Definition) -> str:
        if each.name == "%import":
            return self._import(each)
        regular = each.kind == "rule" and each.name in self._regular
        loose = each.kind == "rule" and not regular and not self._ignores
        body = self._expression(each.body, loose)
        if each.kind == "directive":
            return each.name + body
        name = self._terminal(each.name) if regular else each.name
        return name + "".join(piece.text for piece in each.head) + ":" + body

    def _import(self, each: Definition) -> str:
        names = [piece.text for piece in each.body if piece.kind == "terminal"]
        if not self._quoted or not names:
            return each.name + "".join(piece.text for piece in each.body)
        listed = any(piece.text == "(" for piece in each.body)
        lines = []
        for name, own in zip(names, names, strict=True) if listed else [(names[0], names[-1])]:
            known = _IMPORTED.get(name)
            imported = f"%import common.{name}" + (f" -> {own}" if own != name else "")
            lines.append(imported if known is None else f"{own}: {self._regex(known, '')}")
        return "\n".join(lines)

    def _expression(self, pieces: Sequence[LarkPiece], loose: bool) -> str:
        """Return the converted right side of a definition. ``loose``: a repeated class of
        characters may become a rule."""
        out: list[str] = []
        index = 0
        while index < len(pieces):
            piece = pieces[index]
            index += 1
            match piece.kind:
                case "rule" if piece.text in self._regular:
                    out.append(self._terminal(piece.text))
                case "string" if self._quoted:
                    text, index = self._string(pieces, index)
                    out.append(text)
                case "regex" if self._quoted:
                    source, flags = piece.text[1:].rsplit("/", 1)
                    out.append(self._regex(source, flags, loose))
                case "sign" if self._quoted and piece.text == "~":
                    end = _end_of_operand(pieces, index)
                    operand = self._expression(pieces[index:end], loose=False)
                    negated = end > index
                    out.append(f"(/{QUOTED_TEXT}/ & ~{operand})" if negated else "~")
                    index = end
                case _:
                    out.append(piece.text)
        return "".join(out)

    def _string(self, pieces: Sequence[LarkPiece], index: int) -> tuple[str, int]:
        """Return the string before ``index``, or the range that it begins, and the next index."""
        first = self._decoded(pieces[index - 1])
        visible = [
            i for i in range(index, min(index + 4, len(pieces))) if pieces[i].kind != "space"
        ]
        if len(visible) > 1 and pieces[visible[0]].text == "..":
            last = self._decoded(pieces[visible[1]])
            bounds = "-".join(re.escape(each) for each in (first, last))
            return self._regex(f"[{bounds}]", ""), visible[1] + 1
        flag = "i" if pieces[index - 1].text.endswith("i") else ""
        written = json.dumps(quoted_string(first), ensure_ascii=False).replace("\x7f", r"\u007f")
        return written + flag, index

    def _decoded(self, piece: LarkPiece) -> str:
        text = re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", piece.text.removesuffix("i"))
        try:
            return str(json.loads(text))
        except ValueError:
            raise wrong(f"{piece.text!r} is not a string", piece.line, self._param) from None

    def _regex(self, source: str, flags: str, loose: bool = False) -> str:
        converted = quoted_regex(source, flags, self._param)
        if loose and converted != source and (parts := _repeated_class(source, self._param)):
            own, repeat = parts
            return f"(/{quoted_regex(own, flags, self._param)}/{flags}){repeat}"
        return f"/{converted}/{flags}"


def _end_of_operand(pieces: Sequence[LarkPiece], index: int) -> int:
    """Return the end of the operand that '~' before ``index`` negates; ``index`` if '~' is a
    repetition."""
    start = index
    while index < len(pieces) and pieces[index].kind == "space":
        index += 1
    if index == len(pieces) or pieces[index].kind == "number":
        return start
    depth = 0
    for position in range(index, len(pieces)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(pieces[position].text, 0)
        if depth == 0:
            return position + 1
    return len(pieces)


def _repeated_class(source: str, param: str) -> tuple[str, str] | None:
    """Return the class and the operator of an expression that is a repeated class of characters."""
    source = source.removeprefix("(").removeprefix("?:")
    if source.startswith("["):
        end = end_of_class(source, 0, param)
    elif source.startswith("."):
        end = 1
    else:
        return None
    found = _REPEATED.match(source, end)
    return (source[:end], found[1] or "") if found else None
