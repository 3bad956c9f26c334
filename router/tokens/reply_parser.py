"""Splitting of an answer into reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    """A part of one tool call."""

    number: int  # index of the call in the answer, from 0
    arguments: str = ""  # the arguments of all parts, joined, are JSON
    id: str | None = None  # in the first part only, like the name
    name: str | None = None


class ReplyDelta(NamedTuple):
    """A part of an answer: reasoning, text, or calls."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()
    spans: Sequence[tuple[int, int]] = ()
    """Where ``text`` is in the text that was fed, as start and end of each contiguous piece."""


class ReplyParser(Protocol):
    """Splits one answer as it arrives. The result does not depend on how the text is split into
    pieces."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning."""

    @property
    def called(self) -> bool:
        """Whether the answer has called a tool so far."""

    @property
    def complete(self) -> bool:
        """Whether all further text would be ignored, so that the sequence can be stopped."""

    def parse_work(self, chars: int) -> int:
        """Return how many characters `feed` may have to read after ``chars`` more."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """Return the parts that are final now, in their order."""

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        """Return the rest. ``cut`` is true if a limit or a stop string ended the answer."""


class PlainReplyParser:
    """A `ReplyParser` for answers that are all text."""

    in_reasoning = False
    called = False
    complete = False

    def __init__(self) -> None:
        self._length = 0  # of the text so far

    def parse_work(self, chars: int) -> int:
        return 0

    def feed(self, text: str) -> list[ReplyDelta]:
        start, self._length = self._length, self._length + len(text)
        return [ReplyDelta(text=text, spans=((start, self._length),))] if text else []

    def finish(self, *, cut: bool = False) -> list[ReplyDelta]:
        return []
