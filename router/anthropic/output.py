"""An answer as content blocks, and the events of its stream."""

from __future__ import annotations

import base64
import hashlib
from functools import partial

from router.anthropic.objects import (
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
from router.api.output import OpenBlock, OutputBuilder, json_object
from router.tokens.reply_parser import CallDelta


class ContentBlockBuilder(OutputBuilder[ContentBlock, MessageStreamEvent]):
    """Builds the content blocks of one message."""

    def __init__(self, *, show_thinking: bool) -> None:
        super().__init__(partial(_OpenThinking, show_thinking), _OpenText, _OpenToolUse)


class _OpenContentBlock(OpenBlock[ContentBlock, MessageStreamEvent]):
    def begin(self) -> list[MessageStreamEvent]:
        start = ContentBlockStartEvent(self.index, self.block())
        return [start, PingEvent()] if self.index == 0 else [start]

    def end(self) -> list[MessageStreamEvent]:
        return [ContentBlockStopEvent(self.index)]


class _OpenThinking(_OpenContentBlock):
    def __init__(self, show: bool, index: int) -> None:
        super().__init__(index)
        self._show = show

    def block(self) -> ThinkingBlock:
        return ThinkingBlock(self.text if self._show else "", self._signature)

    def extend(self, delta: str) -> list[MessageStreamEvent]:
        return [ContentBlockDeltaEvent(self.index, ThinkingDelta(delta))] if self._show else []

    def end(self) -> list[MessageStreamEvent]:
        signature = ContentBlockDeltaEvent(self.index, SignatureDelta(self._signature))
        return [signature, *super().end()]

    @property
    def _signature(self) -> str:
        """A signature, because clients expect one. The server accepts thinking with any signature
        or none."""
        if not self.text:
            return ""
        digest = hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=24)
        return base64.b64encode(digest.digest()).decode()


class _OpenText(_OpenContentBlock):
    def block(self) -> TextBlock:
        return TextBlock(self.text)

    def extend(self, delta: str) -> list[MessageStreamEvent]:
        return [ContentBlockDeltaEvent(self.index, TextDelta(delta))]


class _OpenToolUse(_OpenContentBlock):
    def __init__(self, call: CallDelta, index: int) -> None:
        super().__init__(index)
        self._id = "toolu_" + (call.id or str(call.number)).removeprefix("call_")
        self._name = call.name or ""

    def block(self) -> ToolUseBlock:
        return ToolUseBlock(self._id, self._name, json_object(self.text))

    def extend(self, delta: str) -> list[MessageStreamEvent]:
        return [ContentBlockDeltaEvent(self.index, InputJsonDelta(delta))]
