"""A reply as content blocks, and the events that tell of them as they come."""

from __future__ import annotations

import base64
import hashlib
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from router.anthropic.schemas import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputJsonDelta,
    Ping,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from router.api.blanks import Blanks
from router.generation.choice import Piece
from router.tokens.reply import CallDelta

Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class Blocks:
    """The blocks of one reply. Each method returns the events of what it was told."""

    def __init__(self, *, show_thinking: bool) -> None:
        self.finished: list[AnswerBlock] = []
        self._show_thinking = show_thinking
        self._blanks = Blanks()
        self._open: _Open | None = None

    def feed(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.reasoning:
            self._blanks.interrupt(call=False)
            if not isinstance(self._open, _Thinking):
                events += self._begin(_Thinking(self._show_thinking))
            events += self._more(piece.reasoning)
        if text := self._blanks.text(piece.text):
            events += self._say(text)
        for call in piece.calls:
            self._blanks.interrupt(call=True)
            if not isinstance(self._open, _ToolUse) or self._open.number != call.number:
                events += self._begin(_ToolUse(call))
            events += self._more(call.arguments)
        return events

    def finish(self) -> list[Event]:
        rest = self._blanks.finish()
        return [*(self._say(rest) if rest else ()), *self._close()]

    def _say(self, text: str) -> list[Event]:
        begun = [] if isinstance(self._open, _Text) else self._begin(_Text())
        return [*begun, *self._more(text)]

    def _begin(self, block: _Open) -> list[Event]:
        events = self._close()
        self._open = block
        events.append(BlockStart(len(self.finished), block.beginning()))
        if not self.finished:
            events.append(Ping())
        return events

    def _more(self, text: str) -> list[Event]:
        assert self._open is not None
        self._open.text += text
        delta = self._open.delta(text)
        return [] if delta is None else [BlockDelta(len(self.finished), delta)]

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        if block is None:
            return []
        index, last = len(self.finished), block.last_delta()
        self.finished.append(block.whole())
        return [*([BlockDelta(index, last)] if last is not None else ()), BlockStop(index)]


class _Open(ABC):
    """A block that is being said."""

    text = ""

    @abstractmethod
    def beginning(self) -> AnswerBlock: ...

    @abstractmethod
    def delta(self, text: str) -> Delta | None: ...

    def last_delta(self) -> Delta | None:
        return None

    @abstractmethod
    def whole(self) -> AnswerBlock: ...


class _Text(_Open):
    def beginning(self) -> TextBlock:
        return TextBlock("")

    def delta(self, text: str) -> TextDelta:
        return TextDelta(text)

    def whole(self) -> TextBlock:
        return TextBlock(self.text)


class _Thinking(_Open):
    def __init__(self, show: bool) -> None:
        self._show = show

    def beginning(self) -> ThinkingBlock:
        return ThinkingBlock("", "")

    def delta(self, text: str) -> ThinkingDelta | None:
        return ThinkingDelta(text) if self._show else None

    def last_delta(self) -> SignatureDelta:
        return SignatureDelta(self._signature)

    def whole(self) -> ThinkingBlock:
        return ThinkingBlock(self.text if self._show else "", self._signature)

    @property
    def _signature(self) -> str:
        """Clients expect one. Nothing here depends on whose thoughts come back."""
        digest = hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=24)
        return base64.b64encode(digest.digest()).decode()


class _ToolUse(_Open):
    def __init__(self, call: CallDelta) -> None:
        self.number = call.number
        self._id = "toolu_" + (call.id or str(call.number)).removeprefix("call_")
        self._name = call.name or ""

    def beginning(self) -> ToolUseBlock:
        return ToolUseBlock(self._id, self._name, {})

    def delta(self, text: str) -> InputJsonDelta | None:
        return InputJsonDelta(text) if text else None

    def whole(self) -> ToolUseBlock:
        return ToolUseBlock(self._id, self._name, _object(self.text))


def _object(arguments: str) -> dict[str, Any]:
    """Empty for a call that was cut short in the middle of its arguments."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
