"""The source of Lark grammars in llguidance's dialect, as pieces and definitions.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.errors import InvalidRequest

_PIECE = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*) | (?P<space>[ \t]+) | (?P<newline>\r?\n)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?) | (?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    | (?P<rule>!?[_?]?[a-z][_a-z0-9\-]*) | (?P<terminal>_?[A-Z][_A-Z0-9\-]*)
    | (?P<number>[0-9]+) | (?P<directive>%[a-z]+) | (?P<foreign><[^<>\s]+> | @[\w\-]+)
    | (?P<sign>-> | \.\. | :: | [][(){}:,.~+*?|&=_-])""",
    re.VERBOSE,
)
_MAX_DEPTH = 30
"""llguidance's nesting limit."""
_DIRECTIVES = ("%import", "%ignore", "%declare")


class LarkPiece(NamedTuple):
    """A token of a grammar's source."""

    kind: str
    text: str
    line: int


@dataclass
class Definition:
    """A rule or terminal with its pieces before and after the colon, or a directive with all pieces
    after its name."""

    kind: str  # rule, terminal, directive
    name: str
    head: list[LarkPiece]
    body: list[LarkPiece]

    @property
    def rules(self) -> set[str]:
        """The names of the rules that it refers to."""
        return {piece.text for piece in self.body if piece.kind == "rule"}


def definitions(source: str, param: str) -> list[Definition]:
    """Return the definitions in ``source``. Raises `InvalidRequest` with the line for invalid
    syntax, and for syntax that is not supported in the grammar of a tool's input."""
    return [_definition(each, param) for each in _statements(list(_pieces(source, param)))]


def _pieces(source: str, param: str) -> Iterator[LarkPiece]:
    position, line, depth = 0, 1, 0
    while position < len(source):
        found = _PIECE.match(source, position)
        if found is None:
            raise wrong(f"invalid syntax at {source[position : position + 20]!r}", line, param)
        kind, text = found.lastgroup or "", found[0]
        if kind == "foreign" or (kind == "directive" and text not in _DIRECTIVES):
            raise wrong(f"{text!r} is not supported in the grammar of a tool", line, param)
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text, 0)
        if depth > _MAX_DEPTH:
            raise wrong("brackets are nested too deeply", line, param)
        if kind != "comment":
            yield LarkPiece(kind, text, line)
        position, line = found.end(), line + text.count("\n")


def _statements(pieces: Sequence[LarkPiece]) -> Iterator[list[LarkPiece]]:
    """Yield the pieces of each definition, which may continue on lines that begin with '|' or are
    within brackets."""
    statement: list[LarkPiece] = []
    ended = False
    for piece in pieces:
        if piece.kind == "newline":
            ended = True
            piece = LarkPiece("space", "\n", piece.line)
        elif piece.kind != "space":
            if ended and piece.text != "|" and statement:
                yield statement
                statement = []
            ended = False
        if statement or piece.kind != "space":
            statement.append(piece)
    if statement:
        yield statement


def _definition(statement: list[LarkPiece], param: str) -> Definition:
    first = statement[0]
    if first.kind == "directive":
        return Definition("directive", first.text, [], statement[1:])
    colon = next((i for i, piece in enumerate(statement) if piece.text == ":"), None)
    if first.kind not in ("rule", "terminal") or colon is None:
        raise wrong("a definition must begin with a name and ':'", first.line, param)
    head = [piece for piece in statement[1:colon] if piece.kind != "space"]
    body = list(_without_aliases(statement[colon + 1 :]))
    return Definition(first.kind, first.text.lstrip("!?"), head, body)


def _without_aliases(body: Sequence[LarkPiece]) -> Iterator[LarkPiece]:
    """Yield ``body`` without the names of its alternatives, which have no meaning here."""
    after_arrow = False
    for piece in body:
        if after_arrow and piece.kind != "space":
            after_arrow = False
        elif piece.text == "->":
            after_arrow = True
        elif not after_arrow:
            yield piece


def wrong(reason: str, line: int, param: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{param}': line {line}: {reason}.", param=param)


def regular_rules(found: Sequence[Definition]) -> set[str]:
    """Return the names of rules that are not recursive, have no options, and refer only to such
    rules: they can be turned into terminals."""
    rules = {each.name: each.rules for each in found if each.kind == "rule" and not each.head}
    missing = {name: len(referred) for name, referred in rules.items()}
    users: dict[str, list[str]] = defaultdict(list)
    for name, referred in rules.items():
        for other in referred:
            users[other].append(name)
    regular: set[str] = set()
    ready = [name for name, count in missing.items() if not count]
    while ready:
        name = ready.pop()
        regular.add(name)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return regular
