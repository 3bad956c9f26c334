"""Answers to Messages requests: a JSON message or Anthropic's event stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from router.anthropic.errors import error_body
from router.anthropic.objects import (
    AnthropicMessage,
    AnthropicOutputTokensDetails,
    AnthropicUsage,
    ContentBlock,
    MessageDeltaEvent,
    MessageStartEvent,
    MessageStopEvent,
    PingEvent,
    StopDelta,
    StopReason,
)
from router.anthropic.output import ContentBlockBuilder
from router.anthropic.schemas import MessagesRequest
from router.api.output import encode_events
from router.api.sse import MEDIA_TYPE, encode_event
from router.errors import ApiError
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation


class MessageWriter:
    """An `OutputWriter` of one Messages request."""

    def __init__(self, body: MessagesRequest, model: str) -> None:
        self.id = "msg_" + uuid.uuid4().hex
        self.stream_type = MEDIA_TYPE
        self.keep_alive = encode_events(PingEvent())
        self.repeats_request = False
        self._model = model
        self._max_tokens = body.max_tokens
        show_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._output = ContentBlockBuilder(show_thinking=show_thinking)

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> list[bytes]:
        (choice,), (delta,) = generation.choices, deltas
        self._output.feed(delta)
        self._output.finish()
        stop = self._stop_delta(generation, choice)
        message = self._message(generation, self._output.finished, stop)
        return [msgspec.json.encode(message)]

    def opening(self) -> bytes:
        return b""

    def stream_start(self, generation: Generation) -> bytes:
        return encode_events(MessageStartEvent(self._message(generation, [])))

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        return encode_events(*self._output.feed(delta))

    def choice_end(self, generation: Generation, choice: Choice) -> bytes:
        delta = MessageDeltaEvent(self._stop_delta(generation, choice), _usage(generation))
        return encode_events(*self._output.finish(), delta)

    def stream_end(self, generation: Generation) -> bytes:
        return encode_events(MessageStopEvent())

    def error(self, error: ApiError) -> bytes:
        return encode_event(error_body(error), "error")

    def _message(
        self, generation: Generation, content: list[ContentBlock], stop: StopDelta | None = None
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.id,
            model=self._model,
            content=content,
            stop_reason=stop.stop_reason if stop else None,
            stop_sequence=stop.stop_sequence if stop else None,
            usage=_usage(generation),
        )

    def _stop_delta(self, generation: Generation, choice: Choice) -> StopDelta:
        reason: StopReason = "end_turn"
        match choice.finish_reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                # The end of the context reduces the limit of a sequence.
                most = min(self._max_tokens, generation.model.settings.max_generation_tokens)
                lowered = choice.sequence.submit.max_tokens < most
                reason = "model_context_window_exceeded" if lowered else "max_tokens"
            case _ if choice.stop_string is not None:
                return StopDelta("stop_sequence", choice.stop_string)
        return StopDelta(reason, None)


def _usage(generation: Generation) -> AnthropicUsage:
    usage = generation.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=AnthropicOutputTokensDetails(
            usage.completion_tokens_details.reasoning_tokens
        ),
    )
