"""A reply as output items, and the events that tell of them as they come."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence

from router.api.whitespace import WhitespaceBuffer
from router.generation.choice import OutputDelta
from router.responses.objects import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ContentPartAddedEvent,
    ContentPartDoneEvent,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputItemAddedEvent,
    OutputItemDoneEvent,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDeltaEvent,
    ReasoningTextDoneEvent,
    SequencedEvent,
    SummaryPartAddedEvent,
    SummaryPartDoneEvent,
    SummaryText,
    SummaryTextDeltaEvent,
    SummaryTextDoneEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from router.schemas.completions import ChatCompletionTokenLogprob
from router.tokens.reply_parser import CallDelta


class OutputItemBuilder:
    """The items of one reply. Each method returns the events of what it was told.

    ``summarized`` reasoning is given as its own summary.
    """

    def __init__(self, *, summarized: bool) -> None:
        self.items: list[OutputItem] = []
        self._summarized = summarized
        self._whitespace = WhitespaceBuffer()
        self._pending_logprobs: list[ChatCompletionTokenLogprob] = []
        self._open: _OpenItem | None = None

    def feed(
        self, delta: OutputDelta, logprobs: Sequence[ChatCompletionTokenLogprob] = ()
    ) -> list[SequencedEvent]:
        events: list[SequencedEvent] = []
        if delta.reasoning:
            self._whitespace.interrupt(call=False)
            if not isinstance(self._open, _OpenReasoning | _OpenSummary):
                events += self._start(_OpenSummary if self._summarized else _OpenReasoning)
            events += self._extend(delta.reasoning)
        if delta.text:
            self._pending_logprobs += logprobs
            if text := self._whitespace.feed(delta.text):
                events += self._add_text(text)
        for call in delta.calls:
            self._whitespace.interrupt(call=True)
            if not isinstance(self._open, _OpenCall) or self._open.number != call.number:
                events += self._close("completed")
                self._open = _OpenCall(len(self.items), call)
                events += self._open.begin()
            events += self._extend(call.arguments)
        return events

    def finish(self, status: ItemStatus) -> list[SequencedEvent]:
        """``status`` is that of the last item."""
        rest = self._whitespace.finish()
        return [*(self._add_text(rest) if rest else ()), *self._close(status)]

    def _add_text(self, text: str) -> list[SequencedEvent]:
        begun = [] if isinstance(self._open, _OpenMessage) else self._start(_OpenMessage)
        unsaid, self._pending_logprobs = self._pending_logprobs, []
        return [*begun, *self._extend(text, unsaid)]

    def _start(
        self, kind: type[_OpenMessage] | type[_OpenReasoning] | type[_OpenSummary]
    ) -> list[SequencedEvent]:
        events = self._close("completed")
        self._open = kind(len(self.items))
        return events + self._open.begin()

    def _extend(
        self, text: str, logprobs: Sequence[ChatCompletionTokenLogprob] = ()
    ) -> list[SequencedEvent]:
        assert self._open is not None
        self._open.text += text
        self._open.logprobs += logprobs
        return [self._open.delta(text, list(logprobs))] if text else []

    def _close(self, status: ItemStatus) -> list[SequencedEvent]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self.items.append(self._open.item(status))
        self._open = None
        return events


class _OpenItem(ABC):
    """An item that is being said."""

    prefix: str

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = self.prefix + uuid.uuid4().hex
        self.text = ""
        self.logprobs: list[ChatCompletionTokenLogprob] = []

    def begin(self) -> list[SequencedEvent]:
        added = OutputItemAddedEvent(output_index=self.index, item=self.item("in_progress"))
        return [added, *self.begin_content()]

    def end(self, status: ItemStatus) -> list[SequencedEvent]:
        done = OutputItemDoneEvent(output_index=self.index, item=self.item(status))
        return [*self.end_content(), done]

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """As it is so far; without content before there is some."""

    def begin_content(self) -> list[SequencedEvent]:
        return []

    @abstractmethod
    def delta(self, text: str, logprobs: list[ChatCompletionTokenLogprob]) -> SequencedEvent: ...

    @abstractmethod
    def end_content(self) -> list[SequencedEvent]: ...


class _OpenMessage(_OpenItem):
    prefix = "msg_"

    def item(self, status: ItemStatus) -> MessageItem:
        return MessageItem(id=self.id, status=status, content=[self._part] if self.text else [])

    def begin_content(self) -> list[SequencedEvent]:
        return [ContentPartAddedEvent(item_id=self.id, output_index=self.index, part=self._part)]

    def delta(self, text: str, logprobs: list[ChatCompletionTokenLogprob]) -> TextDeltaEvent:
        return TextDeltaEvent(
            item_id=self.id, output_index=self.index, delta=text, logprobs=logprobs
        )

    def end_content(self) -> list[SequencedEvent]:
        part = self._part
        return [
            TextDoneEvent(
                item_id=self.id, output_index=self.index, text=part.text, logprobs=part.logprobs
            ),
            ContentPartDoneEvent(item_id=self.id, output_index=self.index, part=part),
        ]

    @property
    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=list(self.logprobs))


class _OpenReasoning(_OpenItem):
    prefix = "rs_"

    def item(self, status: ItemStatus) -> ReasoningItem:
        content = [ReasoningText(self.text)] if self.text else []
        return ReasoningItem(id=self.id, status=status, summary=[], content=content)

    def begin_content(self) -> list[SequencedEvent]:
        return [
            ContentPartAddedEvent(item_id=self.id, output_index=self.index, part=ReasoningText(""))
        ]

    def delta(
        self, text: str, logprobs: list[ChatCompletionTokenLogprob]
    ) -> ReasoningTextDeltaEvent:
        return ReasoningTextDeltaEvent(item_id=self.id, output_index=self.index, delta=text)

    def end_content(self) -> list[SequencedEvent]:
        part = ReasoningText(self.text)
        return [
            ReasoningTextDoneEvent(item_id=self.id, output_index=self.index, text=self.text),
            ContentPartDoneEvent(item_id=self.id, output_index=self.index, part=part),
        ]


class _OpenSummary(_OpenItem):
    prefix = "rs_"

    def item(self, status: ItemStatus) -> ReasoningItem:
        summary = [SummaryText(self.text)] if self.text else []
        return ReasoningItem(id=self.id, status=status, summary=summary, content=[])

    def begin_content(self) -> list[SequencedEvent]:
        return [
            SummaryPartAddedEvent(item_id=self.id, output_index=self.index, part=SummaryText(""))
        ]

    def delta(self, text: str, logprobs: list[ChatCompletionTokenLogprob]) -> SummaryTextDeltaEvent:
        return SummaryTextDeltaEvent(item_id=self.id, output_index=self.index, delta=text)

    def end_content(self) -> list[SequencedEvent]:
        part = SummaryText(self.text)
        return [
            SummaryTextDoneEvent(item_id=self.id, output_index=self.index, text=self.text),
            SummaryPartDoneEvent(item_id=self.id, output_index=self.index, part=part),
        ]


class _OpenCall(_OpenItem):
    prefix = "fc_"

    def __init__(self, index: int, call: CallDelta) -> None:
        super().__init__(index)
        self.number = call.number
        self._call_id = call.id or f"call_{uuid.uuid4().hex}"
        self._name = call.name or ""

    def item(self, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            arguments=self.text,
            status=status,
        )

    def delta(self, text: str, logprobs: list[ChatCompletionTokenLogprob]) -> ArgumentsDeltaEvent:
        return ArgumentsDeltaEvent(item_id=self.id, output_index=self.index, delta=text)

    def end_content(self) -> list[SequencedEvent]:
        return [
            ArgumentsDoneEvent(
                item_id=self.id,
                output_index=self.index,
                name=self._name,
                arguments=self.text,
            )
        ]
