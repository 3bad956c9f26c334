"""A reply split into its reasoning, its text and its tool calls."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    """A piece of one tool call."""

    number: int  # of the call within the reply, from 0
    arguments: str = ""  # the arguments of all pieces joined are JSON text
    id: str | None = None  # in the first piece only, like the name
    name: str | None = None


class ReplyDelta(NamedTuple):
    """The parts of a stretch of generated text."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class ReplyParser(Protocol):
    """Splits one reply while it arrives. The result does not depend on the pieces it arrives in."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning."""

    @property
    def called(self) -> bool:
        """Whether the reply has called a tool so far."""

    @property
    def complete(self) -> bool:
        """Whether all further text would be ignored, so that the sequence can be stopped."""

    def parse_work(self, chars: int) -> int:
        """Return how much `feed` may have to parse once ``chars`` more have come, in the unit of
        `router.tokens.parsing.calls.MAX_PARSE_WORK`."""

    def feed(self, text: str) -> ReplyDelta:
        """Return what is certain now."""

    def finish(self, *, cut: bool = False) -> ReplyDelta:
        """Return the rest. ``cut`` says that a limit or a stop string ended the reply."""


class PlainReplyParser:
    """A `ReplyParser` for replies that are all text."""

    in_reasoning = False
    called = False
    complete = False

    def parse_work(self, chars: int) -> int:
        return 0

    def feed(self, text: str) -> ReplyDelta:
        return ReplyDelta(text=text)

    def finish(self, *, cut: bool = False) -> ReplyDelta:
        return ReplyDelta()
