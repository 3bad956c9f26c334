"""Growing output items for reasoning and text, with the events of their stream."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property

from router.api.output import OpenBlock
from router.responses.objects import (
    ContentPartAddedEvent,
    ContentPartDoneEvent,
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


class OpenItem(OpenBlock[OutputItem, SequencedEvent]):
    """An output item that is still growing."""

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


class _OpenThoughts(OpenItem):
    """Reasoning. With a ``seal``, the client also gets it encrypted, at its end."""

    id_prefix = "rs_"

    def __init__(self, seal: Callable[[str], str] | None, index: int) -> None:
        super().__init__(index)
        self._seal = seal

    @property
    def _sealed(self) -> str | None:
        return None if self.status == "in_progress" else self._sealed_at_end

    @cached_property
    def _sealed_at_end(self) -> str | None:
        """The encrypted text, made once: encrypting the same text twice gives two results, but all
        events of an item must have the same."""
        return self._seal(self.text) if self._seal else None


class OpenReasoning(_OpenThoughts):
    def block(self) -> ReasoningItem:
        content = [ReasoningText(self.text)] if self.text else []
        return ReasoningItem(
            id=self.id,
            status=self.status,
            summary=[],
            content=content,
            encrypted_content=self._sealed,
        )

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


class OpenSummary(_OpenThoughts):
    def block(self) -> ReasoningItem:
        summary = [SummaryText(self.text)] if self.text else []
        return ReasoningItem(
            id=self.id,
            status=self.status,
            summary=summary,
            content=[],
            encrypted_content=self._sealed,
        )

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


class OpenMessage(OpenItem):
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
