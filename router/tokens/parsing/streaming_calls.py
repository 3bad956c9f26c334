"""Streaming of tool calls whose syntax is enforced by a grammar.

Text that looks like a call may turn out to be something else, so a call is usually reported when it
is complete (`marked`). If a grammar allows only calls, their arguments are reported as they arrive.
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
    """A part of a call."""

    name: str | None  # in the first part only
    arguments: str
    id: str | None = None  # the model's own, in the first part


class StreamingCallParser:
    """Reads calls of ``names`` in the syntax of ``template``, each with a JSON object as arguments.

    A call that begins like an earlier one is reported once it differs. A small model may repeat the
    same call for as long as a grammar allows it, so an exact repetition of an earlier call is not
    reported and ends the answer.
    """

    def __init__(self, template: CallTemplate, names: Iterable[str]) -> None:
        longest_first = sorted(names, key=len, reverse=True)
        name = f"(?P<name>{'|'.join(map(re.escape, longest_first))})"
        begin = re.escape(template.begin).replace(re.escape("{name}"), name, 1)
        self._begin = re.compile(begin.replace(re.escape("{number}"), _NUMBER))
        self._outside = ""  # text since the last call
        self._depth = 0  # nesting depth of objects and arrays
        self._in_string = self._escaped = False
        self.started = False  # whether there has been a call
        self.in_call = False
        self._name = self._arguments = ""  # arguments of the last call
        self._reported = False  # whether the last call was reported
        self._earlier: set[tuple[str, str]] = set()  # names and arguments of complete calls
        self.repeated = False  # whether a call repeated an earlier one

    @property
    def in_reported_call(self) -> bool:
        return self.in_call and self._reported

    def feed(self, text: str) -> list[CallFragment]:
        """Return the parts of calls in ``text``."""
        fragments: list[CallFragment] = []
        while text and not self.repeated:
            if not self.in_call:
                self._outside += text
                found = self._begin.search(self._outside)
                if found is None:
                    break
                self._name, text = found["name"], self._outside[found.end() :]
                self._outside = self._arguments = ""
                self._reported = False
                self.started = self.in_call = True
            end = self._end_of_object(text)
            fragments += self._fragments(text[:end])
            text = text[end:]
        return fragments

    def _fragments(self, arguments: str) -> list[CallFragment]:
        """Return the part of the last call that can be reported, after adding ``arguments``."""
        self._arguments += arguments
        call = (self._name, self._arguments)
        if self._reported:
            fragments = [CallFragment(None, arguments)]
        elif call in self._earlier:
            self.repeated = not self.in_call
            return []
        elif any(name == call[0] and text.startswith(call[1]) for name, text in self._earlier):
            return []
        else:
            fragments = [CallFragment(*call)]
            self._reported = True
        if not self.in_call:
            self._earlier.add(call)
        return fragments

    def _end_of_object(self, text: str) -> int:
        """Return the length of the part of ``text`` that belongs to the current object."""
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
                self.in_call = False
                return position
