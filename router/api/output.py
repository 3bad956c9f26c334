"""An answer as a list of blocks, for APIs with content blocks or output items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import msgspec

from router.api.sse import encode_event
from router.generation.choice import OutputDelta
from router.tokens.reply_parser import CallDelta, ReplyDelta

BlockStatus = Literal["in_progress", "completed", "incomplete"]

_Block = TypeVar("_Block")
_Event = TypeVar("_Event")


class OpenBlock(ABC, Generic[_Block, _Event]):
    """A block that is still growing."""

    def __init__(self, index: int) -> None:
        self.index = index
        """The position in the list."""
        self.text = ""
        """The text so far; for a tool call, its arguments."""
        self.status: BlockStatus = "in_progress"

    @abstractmethod
    def block(self) -> _Block:
        """Return the block as it is now."""

    @abstractmethod
    def begin(self) -> list[_Event]:
        """Return the events that announce the block."""

    @abstractmethod
    def extend(self, delta: str) -> list[_Event]:
        """Return the events of ``delta``, which is already part of `text`."""

    @abstractmethod
    def end(self) -> list[_Event]:
        """Return the closing events, after `status` is set."""


class OutputBuilder(Generic[_Block, _Event]):
    """Divides an answer into blocks of reasoning, text or tool calls. A block lasts until the next
    begins."""

    def __init__(
        self,
        open_reasoning: Callable[[int], OpenBlock[_Block, _Event]],
        open_text: Callable[[int], OpenBlock[_Block, _Event]],
        open_call: Callable[[CallDelta, int], OpenBlock[_Block, _Event]],
    ) -> None:
        self.finished: list[_Block] = []
        self._open_reasoning = open_reasoning
        self._open_text = open_text
        self._open_call = open_call
        self._open: OpenBlock[_Block, _Event] | None = None
        self._open_key: str | int = ""
        """The kind of the open block, or the number of its tool call."""

    def feed(self, delta: OutputDelta) -> list[_Event]:
        """Add ``delta`` and return its events."""
        return [event for part in delta.parts for event in self._add(part)]

    def finish(self, last_status: BlockStatus = "completed") -> list[_Event]:
        """End the answer and return the closing events. ``last_status`` is the status of the last
        block."""
        return self._close(last_status)

    def _add(self, part: ReplyDelta) -> list[_Event]:
        events: list[_Event] = []
        if part.reasoning:
            events += self._extend("reasoning", self._open_reasoning, part.reasoning)
        if part.text:
            events += self._extend("text", self._open_text, part.text)
        for call in part.calls:
            events += self._extend(call.number, partial(self._open_call, call), call.arguments)
        return events

    def _extend(
        self, key: str | int, new_block: Callable[[int], OpenBlock[_Block, _Event]], delta: str
    ) -> list[_Event]:
        events: list[_Event] = []
        if self._open is None or self._open_key != key:
            events += self._close("completed")
            self._open, self._open_key = new_block(len(self.finished)), key
            events += self._open.begin()
        self._open.text += delta
        return events + (self._open.extend(delta) if delta else [])

    def _close(self, status: BlockStatus) -> list[_Event]:
        block, self._open = self._open, None
        if block is None:
            return []
        block.status = status
        self.finished.append(block.block())
        return block.end()


def encode_events(*events: msgspec.Struct) -> bytes:
    """Return ``events`` as server-sent events, each named after its tag."""
    return b"".join(
        encode_event(msgspec.json.encode(event), str(event.__struct_config__.tag))
        for event in events
    )


def json_object(arguments: str) -> dict[str, Any]:
    """Return the decoded ``arguments`` of a tool call; an empty object if the answer was cut off
    inside them."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
