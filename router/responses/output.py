"""A reply as output items, and the events that tell of them as they come."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence

from router.api.blanks import Blanks
from router.generation.choice import Piece
from router.responses.objects import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    FunctionCallItem,
    ItemAdded,
    ItemDone,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryText,
    TextDelta,
    TextDone,
)
from router.schemas.objects import ChatToken
from router.tokens.reply import CallDelta


class Output:
    """The items of one reply. Each method returns the events of what it was told.

    ``summarized`` reasoning is given as its own summary.
    """

    def __init__(self, *, summarized: bool) -> None:
        self.items: list[OutputItem] = []
        self._summarized = summarized
        self._blanks = Blanks()
        self._unsaid: list[ChatToken] = []
        self._open: _Open | None = None

    def feed(self, piece: Piece, logprobs: Sequence[ChatToken] = ()) -> list[Event]:
        events: list[Event] = []
        if piece.reasoning:
            self._blanks.interrupt(call=False)
            if not isinstance(self._open, _Reasoning | _Summary):
                events += self._begin(_Summary if self._summarized else _Reasoning)
            events += self._more(piece.reasoning)
        if piece.text:
            self._unsaid += logprobs
            if text := self._blanks.text(piece.text):
                events += self._say(text)
        for call in piece.calls:
            self._blanks.interrupt(call=True)
            if not isinstance(self._open, _Call) or self._open.number != call.number:
                events += self._close("completed")
                self._open = _Call(len(self.items), call)
                events += self._open.begin()
            events += self._more(call.arguments)
        return events

    def finish(self, status: ItemStatus) -> list[Event]:
        """``status`` is that of the last item."""
        rest = self._blanks.finish()
        return [*(self._say(rest) if rest else ()), *self._close(status)]

    def _say(self, text: str) -> list[Event]:
        begun = [] if isinstance(self._open, _Message) else self._begin(_Message)
        unsaid, self._unsaid = self._unsaid, []
        return [*begun, *self._more(text, unsaid)]

    def _begin(self, kind: type[_Message] | type[_Reasoning] | type[_Summary]) -> list[Event]:
        events = self._close("completed")
        self._open = kind(len(self.items))
        return events + self._open.begin()

    def _more(self, text: str, logprobs: Sequence[ChatToken] = ()) -> list[Event]:
        assert self._open is not None
        self._open.text += text
        self._open.logprobs += logprobs
        return [self._open.delta(text, list(logprobs))] if text else []

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self.items.append(self._open.item(status))
        self._open = None
        return events


class _Open(ABC):
    """An item that is being said."""

    prefix: str

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = self.prefix + uuid.uuid4().hex
        self.text = ""
        self.logprobs: list[ChatToken] = []

    def begin(self) -> list[Event]:
        added = ItemAdded(output_index=self.index, item=self.item("in_progress"))
        return [added, *self.begin_content()]

    def end(self, status: ItemStatus) -> list[Event]:
        done = ItemDone(output_index=self.index, item=self.item(status))
        return [*self.end_content(), done]

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """As it is so far; without content before there is some."""

    def begin_content(self) -> list[Event]:
        return []

    @abstractmethod
    def delta(self, text: str, logprobs: list[ChatToken]) -> Event: ...

    @abstractmethod
    def end_content(self) -> list[Event]: ...


class _Message(_Open):
    prefix = "msg_"

    def item(self, status: ItemStatus) -> MessageItem:
        return MessageItem(id=self.id, status=status, content=[self._part] if self.text else [])

    def begin_content(self) -> list[Event]:
        return [PartAdded(item_id=self.id, output_index=self.index, part=self._part)]

    def delta(self, text: str, logprobs: list[ChatToken]) -> TextDelta:
        return TextDelta(item_id=self.id, output_index=self.index, delta=text, logprobs=logprobs)

    def end_content(self) -> list[Event]:
        part = self._part
        return [
            TextDone(
                item_id=self.id, output_index=self.index, text=part.text, logprobs=part.logprobs
            ),
            PartDone(item_id=self.id, output_index=self.index, part=part),
        ]

    @property
    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=list(self.logprobs))


class _Reasoning(_Open):
    prefix = "rs_"

    def item(self, status: ItemStatus) -> ReasoningItem:
        content = [ReasoningText(self.text)] if self.text else []
        return ReasoningItem(id=self.id, status=status, summary=[], content=content)

    def begin_content(self) -> list[Event]:
        return [PartAdded(item_id=self.id, output_index=self.index, part=ReasoningText(""))]

    def delta(self, text: str, logprobs: list[ChatToken]) -> ReasoningDelta:
        return ReasoningDelta(item_id=self.id, output_index=self.index, delta=text)

    def end_content(self) -> list[Event]:
        part = ReasoningText(self.text)
        return [
            ReasoningDone(item_id=self.id, output_index=self.index, text=self.text),
            PartDone(item_id=self.id, output_index=self.index, part=part),
        ]


class _Summary(_Open):
    prefix = "rs_"

    def item(self, status: ItemStatus) -> ReasoningItem:
        summary = [SummaryText(self.text)] if self.text else []
        return ReasoningItem(id=self.id, status=status, summary=summary, content=[])

    def begin_content(self) -> list[Event]:
        return [SummaryPartAdded(item_id=self.id, output_index=self.index, part=SummaryText(""))]

    def delta(self, text: str, logprobs: list[ChatToken]) -> SummaryDelta:
        return SummaryDelta(item_id=self.id, output_index=self.index, delta=text)

    def end_content(self) -> list[Event]:
        part = SummaryText(self.text)
        return [
            SummaryDone(item_id=self.id, output_index=self.index, text=self.text),
            SummaryPartDone(item_id=self.id, output_index=self.index, part=part),
        ]


class _Call(_Open):
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

    def delta(self, text: str, logprobs: list[ChatToken]) -> ArgumentsDelta:
        return ArgumentsDelta(item_id=self.id, output_index=self.index, delta=text)

    def end_content(self) -> list[Event]:
        return [
            ArgumentsDone(
                item_id=self.id,
                output_index=self.index,
                name=self._name,
                arguments=self.text,
            )
        ]
