"""A reply as content blocks, and the events that tell of them as they come."""

from __future__ import annotations

import base64
import hashlib
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from router.anthropic.schemas import (
    ContentBlock,
    ContentBlockDeltaEvent,
    ContentBlockStartEvent,
    ContentBlockStopEvent,
    InputJsonDelta,
    MessageStreamEvent,
    PingEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from router.api.whitespace import WhitespaceBuffer
from router.generation.choice import OutputDelta
from router.tokens.reply_parser import CallDelta

ContentBlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockBuilder:
    """The blocks of one reply. Each method returns the events of what it was told."""

    def __init__(self, *, show_thinking: bool) -> None:
        self.finished: list[ContentBlock] = []
        self._show_thinking = show_thinking
        self._whitespace = WhitespaceBuffer()
        self._open: _OpenBlock | None = None

    def feed(self, delta: OutputDelta) -> list[MessageStreamEvent]:
        events: list[MessageStreamEvent] = []
        if delta.reasoning:
            self._whitespace.interrupt(call=False)
            if not isinstance(self._open, _OpenThinking):
                events += self._start(_OpenThinking(self._show_thinking))
            events += self._extend(delta.reasoning)
        if text := self._whitespace.feed(delta.text):
            events += self._add_text(text)
        for call in delta.calls:
            self._whitespace.interrupt(call=True)
            if not isinstance(self._open, _OpenToolUse) or self._open.number != call.number:
                events += self._start(_OpenToolUse(call))
            events += self._extend(call.arguments)
        return events

    def finish(self) -> list[MessageStreamEvent]:
        rest = self._whitespace.finish()
        return [*(self._add_text(rest) if rest else ()), *self._close()]

    def _add_text(self, text: str) -> list[MessageStreamEvent]:
        begun = [] if isinstance(self._open, _OpenText) else self._start(_OpenText())
        return [*begun, *self._extend(text)]

    def _start(self, block: _OpenBlock) -> list[MessageStreamEvent]:
        events = self._close()
        self._open = block
        events.append(ContentBlockStartEvent(len(self.finished), block.empty_block()))
        if not self.finished:
            events.append(PingEvent())
        return events

    def _extend(self, text: str) -> list[MessageStreamEvent]:
        assert self._open is not None
        self._open.text += text
        delta = self._open.delta(text)
        return [] if delta is None else [ContentBlockDeltaEvent(len(self.finished), delta)]

    def _close(self) -> list[MessageStreamEvent]:
        block, self._open = self._open, None
        if block is None:
            return []
        index, last = len(self.finished), block.last_delta()
        self.finished.append(block.finished_block())
        return [
            *([ContentBlockDeltaEvent(index, last)] if last is not None else ()),
            ContentBlockStopEvent(index),
        ]


class _OpenBlock(ABC):
    """A block that is being said."""

    text = ""

    @abstractmethod
    def empty_block(self) -> ContentBlock: ...

    @abstractmethod
    def delta(self, text: str) -> ContentBlockDelta | None: ...

    def last_delta(self) -> ContentBlockDelta | None:
        return None

    @abstractmethod
    def finished_block(self) -> ContentBlock: ...


class _OpenText(_OpenBlock):
    def empty_block(self) -> TextBlock:
        return TextBlock("")

    def delta(self, text: str) -> TextDelta:
        return TextDelta(text)

    def finished_block(self) -> TextBlock:
        return TextBlock(self.text)


class _OpenThinking(_OpenBlock):
    def __init__(self, show: bool) -> None:
        self._show = show

    def empty_block(self) -> ThinkingBlock:
        return ThinkingBlock("", "")

    def delta(self, text: str) -> ThinkingDelta | None:
        return ThinkingDelta(text) if self._show else None

    def last_delta(self) -> SignatureDelta:
        return SignatureDelta(self._signature)

    def finished_block(self) -> ThinkingBlock:
        return ThinkingBlock(self.text if self._show else "", self._signature)

    @property
    def _signature(self) -> str:
        """Clients expect one. Nothing here depends on whose thoughts come back."""
        digest = hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=24)
        return base64.b64encode(digest.digest()).decode()


class _OpenToolUse(_OpenBlock):
    def __init__(self, call: CallDelta) -> None:
        self.number = call.number
        self._id = "toolu_" + (call.id or str(call.number)).removeprefix("call_")
        self._name = call.name or ""

    def empty_block(self) -> ToolUseBlock:
        return ToolUseBlock(self._id, self._name, {})

    def delta(self, text: str) -> InputJsonDelta | None:
        return InputJsonDelta(text) if text else None

    def finished_block(self) -> ToolUseBlock:
        return ToolUseBlock(self._id, self._name, _object(self.text))


def _object(arguments: str) -> dict[str, Any]:
    """Empty for a call that was cut short in the middle of its arguments."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
