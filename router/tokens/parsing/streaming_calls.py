"""Calls as they are written, where a grammar sees to it that they are calls.

What a model writes of its own accord may turn out to be none, so it is told of when it is whole
(`marked`). Where nothing but calls can come, their arguments are passed on as they come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from router.tokens.parsing.grammars import CallTemplate

_NUMBER = "[0-9]{1,3}"
_INSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class CallFragment(NamedTuple):
    """``name`` where a call begins, and more of its ``arguments``."""

    name: str | None
    arguments: str


class StreamingCallParser:
    """Reads calls of ``names`` that are written by ``template``, with a JSON object each for their
    arguments."""

    def __init__(self, template: CallTemplate, names: Iterable[str]) -> None:
        longest_first = sorted(names, key=len, reverse=True)
        name = f"(?P<name>{'|'.join(map(re.escape, longest_first))})"
        begin = re.escape(template.begin)
        begin = begin.replace(re.escape("{name}"), name, 1)
        self._begin = re.compile(begin.replace(re.escape("{number}"), _NUMBER))
        self._outside = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self.num_begun = self.num_ended = 0
        """How many calls have, so far."""

    def feed(self, text: str) -> list[CallFragment]:
        fragments: list[CallFragment] = []
        while text:
            name = None
            if self.num_begun == self.num_ended:
                self._outside += text
                found = self._begin.search(self._outside)
                if found is None:
                    break
                name, text = found["name"], self._outside[found.end() :]
                self._outside = ""
                self.num_begun += 1
            end = self._end_of_object(text)
            fragments.append(CallFragment(name, text[:end]))
            text = text[end:]
        return fragments

    def _end_of_object(self, text: str) -> int:
        """How much of ``text`` is of the object that is being read."""
        position = int(self._escaped and bool(text))
        self._escaped &= not text
        while True:
            found = (_IN_STRING if self._in_string else _INSIDE).search(text, position)
            if found is None:
                return len(text)
            position = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = position == len(text)
                    position += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if not self._depth and not self._in_string:
                self.num_ended += 1
                return position
