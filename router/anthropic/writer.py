"""Answers to Messages requests: a message, or Anthropic's event stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from router.anthropic.content_blocks import ContentBlockBuilder
from router.anthropic.errors import error_body
from router.anthropic.schemas import (
    AnthropicMessage,
    AnthropicOutputTokensDetails,
    AnthropicUsage,
    ContentBlock,
    MessageDeltaEvent,
    MessageStartEvent,
    MessageStopEvent,
    MessageStreamEvent,
    PingEvent,
    StopDelta,
    StopReason,
)
from router.api.sse import encode_event
from router.errors import ApiError
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation


class MessageWriter:
    """An `OutputWriter`. ``max_tokens`` is what was asked for, before the context's end cut it."""

    def __init__(self, model: str, max_tokens: int, *, show_thinking: bool) -> None:
        self.id = "msg_" + uuid.uuid4().hex
        self.keep_alive = _encode(PingEvent())
        self._model = model
        self._max_tokens = max_tokens
        self._blocks = ContentBlockBuilder(show_thinking=show_thinking)

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes:
        (choice,), (delta,) = generation.choices, deltas
        self._blocks.feed(delta)
        self._blocks.finish()
        message = self._message(generation, self._blocks.finished, self._stop_delta(choice))
        return msgspec.json.encode(message)

    def stream_start(self, generation: Generation) -> bytes:
        return _encode(MessageStartEvent(self._message(generation, [])))

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        return _encode(*self._blocks.feed(delta))

    def choice_end(self, generation: Generation, choice: Choice) -> bytes:
        delta = MessageDeltaEvent(self._stop_delta(choice), _usage(generation))
        return _encode(*self._blocks.finish(), delta)

    def stream_end(self, generation: Generation) -> bytes:
        return _encode(MessageStopEvent())

    def error(self, error: ApiError) -> bytes:
        return encode_event(error_body(error), "error")

    def _message(
        self, generation: Generation, content: list[ContentBlock], ending: StopDelta | None = None
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.id,
            model=self._model,
            content=content,
            stop_reason=ending.stop_reason if ending else None,
            stop_sequence=ending.stop_sequence if ending else None,
            usage=_usage(generation),
        )

    def _stop_delta(self, choice: Choice) -> StopDelta:
        reason: StopReason = "end_turn"
        match choice.finish_reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                cut = choice.sequence.submit.max_tokens < self._max_tokens
                reason = "model_context_window_exceeded" if cut else "max_tokens"
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


def _encode(*events: MessageStreamEvent) -> bytes:
    return b"".join(
        encode_event(msgspec.json.encode(each), str(each.__struct_config__.tag)) for each in events
    )
