"""Answers to Messages requests: a message, or Anthropic's event stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from router.anthropic.blocks import Blocks
from router.anthropic.errors import error_body
from router.anthropic.schemas import (
    AnswerBlock,
    Ending,
    Event,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    StopReason,
    Usage,
)
from router.api.events import as_event
from router.errors import ApiError
from router.generation.choice import Choice, Piece
from router.generation.generation import Generation


class MessageWriter:
    """An `AnswerWriter`. ``max_tokens`` is what was asked for, before the context's end cut it."""

    def __init__(self, model: str, max_tokens: int, *, show_thinking: bool) -> None:
        self.id = "msg_" + uuid.uuid4().hex
        self.keep_alive = _encode(Ping())
        self._model = model
        self._max_tokens = max_tokens
        self._blocks = Blocks(show_thinking=show_thinking)

    def whole(self, generation: Generation, pieces: Sequence[Piece]) -> bytes:
        (choice,), (piece,) = generation.choices, pieces
        self._blocks.feed(piece)
        self._blocks.finish()
        message = self._message(generation, self._blocks.finished, self._ending(choice))
        return msgspec.json.encode(message)

    def opening(self, generation: Generation) -> bytes:
        return _encode(MessageStart(self._message(generation, [])))

    def piece(self, generation: Generation, choice: Choice, piece: Piece) -> bytes:
        return _encode(*self._blocks.feed(piece))

    def end(self, generation: Generation, choice: Choice) -> bytes:
        delta = MessageDelta(self._ending(choice), _usage(generation))
        return _encode(*self._blocks.finish(), delta)

    def closing(self, generation: Generation) -> bytes:
        return _encode(MessageStop())

    def error(self, error: ApiError) -> bytes:
        return as_event(error_body(error), "error")

    def _message(
        self, generation: Generation, content: list[AnswerBlock], ending: Ending | None = None
    ) -> Message:
        return Message(
            id=self.id,
            model=self._model,
            content=content,
            stop_reason=ending.stop_reason if ending else None,
            stop_sequence=ending.stop_sequence if ending else None,
            usage=_usage(generation),
        )

    def _ending(self, choice: Choice) -> Ending:
        reason: StopReason = "end_turn"
        match choice.finish_reason:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                cut = choice.flight.order.max_tokens < self._max_tokens
                reason = "model_context_window_exceeded" if cut else "max_tokens"
            case _ if choice.stop_string is not None:
                return Ending("stop_sequence", choice.stop_string)
        return Ending(reason, None)


def _usage(generation: Generation) -> Usage:
    usage = generation.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return Usage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
    )


def _encode(*events: Event) -> bytes:
    return b"".join(
        as_event(msgspec.json.encode(each), str(each.__struct_config__.tag)) for each in events
    )
