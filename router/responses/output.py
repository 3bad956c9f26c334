"""An answer as output items, and the events of its stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from router.api.output import OutputBuilder
from router.generation.choice import OutputDelta
from router.responses.calls import open_call
from router.responses.items import OpenMessage, OpenReasoning, OpenSummary
from router.responses.objects import (
    OutputItem,
    OutputItemAddedEvent,
    OutputItemDoneEvent,
    SequencedEvent,
)
from router.responses.tools import ClientTool
from router.schemas.completions import ChatCompletionTokenLogprob
from router.tokens.reply_parser import ReplyDelta


class OutputItemBuilder(OutputBuilder[OutputItem, SequencedEvent]):
    """Builds the output items of one response. If ``summarized``, the reasoning is returned as its
    own summary. ``tools`` are the callable tools. ``seal`` is given if the client keeps encrypted
    reasoning."""

    def __init__(
        self,
        *,
        summarized: bool,
        tools: Iterable[ClientTool] = (),
        seal: Callable[[str], str] | None = None,
    ) -> None:
        self._logprobs: deque[tuple[int, ChatCompletionTokenLogprob]] = deque()
        """Where tokens begin, and their log-probabilities, until text behind them is known."""
        self._pending_logprobs: list[ChatCompletionTokenLogprob] = []
        """Log-probabilities of text not sent in an event yet."""
        open_message = partial(OpenMessage, self._pending_logprobs)
        by_name = {tool.function.name: tool for tool in tools}
        open_reasoning = partial(OpenSummary if summarized else OpenReasoning, seal)
        super().__init__(open_reasoning, open_message, partial(open_call, by_name))

    def begin(self) -> list[SequencedEvent]:
        """Return the events of items that were there before the answer."""
        return [
            event
            for index, item in enumerate(self.finished)
            for event in (
                OutputItemAddedEvent(output_index=index, item=item),
                OutputItemDoneEvent(output_index=index, item=item),
            )
        ]

    def feed(
        self, delta: OutputDelta, logprobs: Sequence[ChatCompletionTokenLogprob] = ()
    ) -> list[SequencedEvent]:
        """Add ``delta``, with the ``logprobs`` of its tokens, and return its events."""
        offsets = (token.offset for token in delta.tokens or ())
        self._logprobs.extend(zip(offsets, logprobs, strict=True))
        return super().feed(delta)

    def _add(self, part: ReplyDelta) -> list[SequencedEvent]:
        for start, end in part.spans:
            self._pending_logprobs += self._logprobs_of(start, end)
        return super()._add(part)

    def _logprobs_of(self, start: int, end: int) -> Iterator[ChatCompletionTokenLogprob]:
        """Return those of the tokens between ``start`` and ``end``, also in part. Earlier ones are
        dropped."""
        found = self._logprobs
        while len(found) > 1 and found[0][0] < start and found[1][0] <= start:
            found.popleft()
        while found and found[0][0] < end:
            yield found.popleft()[1]
