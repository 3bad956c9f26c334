"""A reply as output items, and the events of its stream."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from router.api.output import OpenBlock, OutputBuilder
from router.generation.choice import OutputDelta
from router.responses.objects import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ContentPartAddedEvent,
    ContentPartDoneEvent,
    FunctionCallItem,
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


class OutputItemBuilder(OutputBuilder[OutputItem, SequencedEvent]):
    """Builds the output items of one response. ``summarized`` reasoning is its own summary."""

    def __init__(self, *, summarized: bool) -> None:
        self._pending_logprobs: list[ChatCompletionTokenLogprob] = []
        """Of text that no event has had yet."""
        open_message = partial(_OpenMessage, self._pending_logprobs)
        super().__init__(_OpenSummary if summarized else _OpenReasoning, open_message, _OpenCall)

    def feed(
        self, delta: OutputDelta, logprobs: Sequence[ChatCompletionTokenLogprob] = ()
    ) -> list[SequencedEvent]:
        if delta.text:
            self._pending_logprobs += logprobs
        return super().feed(delta)


class _OpenItem(OpenBlock[OutputItem, SequencedEvent]):
    id_prefix: str

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.id = self.id_prefix + uuid.uuid4().hex

    def begin(self) -> list[SequencedEvent]:
        added = OutputItemAddedEvent(output_index=self.index, item=self.block())
        return [added, *self.begin_content()]

    def end(self) -> list[SequencedEvent]:
        done = OutputItemDoneEvent(output_index=self.index, item=self.block())
        return [*self.end_content(), done]

    def begin_content(self) -> list[SequencedEvent]:
        return []

    @abstractmethod
    def end_content(self) -> list[SequencedEvent]: ...


class _OpenReasoning(_OpenItem):
    id_prefix = "rs_"

    def block(self) -> ReasoningItem:
        content = [ReasoningText(self.text)] if self.text else []
        return ReasoningItem(id=self.id, status=self.status, summary=[], content=content)

    def begin_content(self) -> list[SequencedEvent]:
        part = ReasoningText("")
        return [ContentPartAddedEvent(item_id=self.id, output_index=self.index, part=part)]

    def extend(self, delta: str) -> list[SequencedEvent]:
        return [ReasoningTextDeltaEvent(item_id=self.id, output_index=self.index, delta=delta)]

    def end_content(self) -> list[SequencedEvent]:
        part = ReasoningText(self.text)
        return [
            ReasoningTextDoneEvent(item_id=self.id, output_index=self.index, text=self.text),
            ContentPartDoneEvent(item_id=self.id, output_index=self.index, part=part),
        ]


class _OpenSummary(_OpenItem):
    id_prefix = "rs_"

    def block(self) -> ReasoningItem:
        summary = [SummaryText(self.text)] if self.text else []
        return ReasoningItem(id=self.id, status=self.status, summary=summary, content=[])

    def begin_content(self) -> list[SequencedEvent]:
        part = SummaryText("")
        return [SummaryPartAddedEvent(item_id=self.id, output_index=self.index, part=part)]

    def extend(self, delta: str) -> list[SequencedEvent]:
        return [SummaryTextDeltaEvent(item_id=self.id, output_index=self.index, delta=delta)]

    def end_content(self) -> list[SequencedEvent]:
        part = SummaryText(self.text)
        return [
            SummaryTextDoneEvent(item_id=self.id, output_index=self.index, text=self.text),
            SummaryPartDoneEvent(item_id=self.id, output_index=self.index, part=part),
        ]


class _OpenMessage(_OpenItem):
    id_prefix = "msg_"

    def __init__(self, pending_logprobs: list[ChatCompletionTokenLogprob], index: int) -> None:
        super().__init__(index)
        self._pending_logprobs = pending_logprobs
        self._logprobs: list[ChatCompletionTokenLogprob] = []

    def block(self) -> MessageItem:
        content = [self._part] if self.text else []
        return MessageItem(id=self.id, status=self.status, content=content)

    def begin_content(self) -> list[SequencedEvent]:
        return [ContentPartAddedEvent(item_id=self.id, output_index=self.index, part=self._part)]

    def extend(self, delta: str) -> list[SequencedEvent]:
        logprobs = self._pending_logprobs.copy()
        self._pending_logprobs.clear()
        self._logprobs += logprobs
        return [
            TextDeltaEvent(item_id=self.id, output_index=self.index, delta=delta, logprobs=logprobs)
        ]

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
        return OutputText(text=self.text, logprobs=list(self._logprobs))


class _OpenCall(_OpenItem):
    id_prefix = "fc_"

    def __init__(self, call: CallDelta, index: int) -> None:
        super().__init__(index)
        self._call_id = call.id or f"call_{uuid.uuid4().hex}"
        self._name = call.name or ""

    def block(self) -> FunctionCallItem:
        return FunctionCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            arguments=self.text,
            status=self.status,
        )

    def extend(self, delta: str) -> list[SequencedEvent]:
        return [ArgumentsDeltaEvent(item_id=self.id, output_index=self.index, delta=delta)]

    def end_content(self) -> list[SequencedEvent]:
        return [
            ArgumentsDoneEvent(
                item_id=self.id, output_index=self.index, name=self._name, arguments=self.text
            )
        ]
