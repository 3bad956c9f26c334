"""An answer as output items, and the events of its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from router.api.output import OutputBuilder
from router.generation.choice import OutputDelta
from router.responses.calls import open_call
from router.responses.items import OpenMessage, OpenReasoning, OpenSummary
from router.responses.objects import OutputItem, SequencedEvent
from router.responses.tools import ClientTool
from router.schemas.completions import ChatCompletionTokenLogprob


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
        self._pending_logprobs: list[ChatCompletionTokenLogprob] = []
        """Log-probabilities of text not sent in an event yet."""
        open_message = partial(OpenMessage, self._pending_logprobs)
        by_name = {tool.function.name: tool for tool in tools}
        open_reasoning = partial(OpenSummary if summarized else OpenReasoning, seal)
        super().__init__(open_reasoning, open_message, partial(open_call, by_name))

    def feed(
        self, delta: OutputDelta, logprobs: Sequence[ChatCompletionTokenLogprob] = ()
    ) -> list[SequencedEvent]:
        if delta.text:
            self._pending_logprobs += logprobs
        return super().feed(delta)
