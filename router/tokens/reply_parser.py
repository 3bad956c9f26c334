"""What a model says, taken apart: its reasoning, its text, and the tools that it calls."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    """More of tool call ``number`` of a reply; ``id`` and ``name`` come with its first
    piece. The pieces of ``arguments`` joined are JSON text."""

    number: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ReplyDelta(NamedTuple):
    """What a stretch of generated text was."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class ReplyParser(Protocol):
    """Takes one reply apart as it comes. How the text is cut into pieces does not matter."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token is one of reasoning."""

    @property
    def called(self) -> bool:
        """Whether the reply has called a tool so far."""

    @property
    def complete(self) -> bool:
        """Whether nothing that comes now would count, so that nothing needs to."""

    def feed(self, text: str) -> ReplyDelta:
        """What is certain now."""

    def finish(self, *, cut: bool = False) -> ReplyDelta:
        """The rest: nothing comes any more. ``cut`` says that more would have come, had it not
        been for a limit or a stop string."""


class PlainReplyParser:
    """A reply that is all text."""

    in_reasoning = False
    called = False
    complete = False

    def feed(self, text: str) -> ReplyDelta:
        return ReplyDelta(text=text)

    def finish(self, *, cut: bool = False) -> ReplyDelta:
        return ReplyDelta()
