"""Finds the end of an argument's value in a tool call as its text arrives."""

from __future__ import annotations

import re
from typing import Protocol

from router.tokens.detokenizer import partial_match_length


class ValueText(Protocol):
    """The text of one value."""

    def feed(self, text: str) -> tuple[str, str] | None:
        """Add ``text``. Return the value and the text after it, or None if it continues."""

    def so_far(self) -> str:
        """Return the part of an unfinished value."""


class TaggedValue:
    """A value that ends with the tag ``end``, which is not returned."""

    def __init__(self, end: str) -> None:
        self._end = end
        self._pieces: list[str] = []
        self._tail = ""  # the end of the text, where the tag may begin

    def feed(self, text: str) -> tuple[str, str] | None:
        joined = self._tail + text
        self._pieces.append(text)
        place = joined.find(self._end)
        if place < 0:
            self._tail = joined[-(len(self._end) - 1) :]
            return None
        rest = joined[place + len(self._end) :]
        whole = self.so_far()
        return whole[: len(whole) - len(rest) - len(self._end)], rest

    def so_far(self) -> str:
        return "".join(self._pieces)


class ListedValue:
    """A value that ends before a comma or a closing bracket, outside strings and its own brackets.
    ``quotes`` delimit strings; with ``escapes``, a backslash in them escapes a character."""

    def __init__(self, quotes: tuple[str, ...], escapes: bool) -> None:
        self._quotes = quotes
        self._outside = re.compile("|".join([*map(re.escape, quotes), r"[][(){},]"]))
        self._inside = {
            quote: re.compile(re.escape(quote) + (r"|\\(?s:.)" if escapes else ""))
            for quote in quotes
        }
        self._escapes = escapes
        self._pieces: list[str] = []
        self._held = ""  # the start of a quote or an escape
        self._quote = ""  # the quote of the open string
        self._depth = 0

    def feed(self, text: str) -> tuple[str, str] | None:
        text = self._held + text
        certain = len(text) - partial_match_length(text, self._quotes)
        position = 0
        while True:
            pattern = self._inside[self._quote] if self._quote else self._outside
            found = pattern.search(text, position, certain)
            if found is None:
                break
            if not self._depth and not self._quote and found[0] in ",)]}":
                self._pieces.append(text[: found.start()])
                self._held = ""
                return self.so_far(), text[found.start() :]
            position = found.end()
            if found[0] in self._quotes:
                self._quote = "" if self._quote else found[0]
            elif not self._quote and found[0] != ",":
                self._depth += 1 if found[0] in "([{" else -1
        if self._escapes and self._quote and text.endswith("\\", position):
            certain = len(text) - 1
        self._pieces.append(text[:certain])
        self._held = text[certain:]
        return None

    def so_far(self) -> str:
        return "".join([*self._pieces, self._held])
