"""The look of answers: what every API writes, and the two that OpenAI's completions share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from router.api.events import as_event
from router.errors import ApiError
from router.generation.choice import Choice, Piece
from router.generation.generation import Generation
from router.schemas.objects import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    FinishReason,
    FunctionDelta,
    Head,
    MessageDelta,
    PromptLogprobs,
    TextChoice,
    TextCompletion,
    ToolCallDelta,
    UsageBody,
)
from router.tokens.logprobs import Details, chat_logprobs, text_logprobs

DONE = "[DONE]"
"""The data of the event that ends a stream."""


class AnswerWriter(Protocol):
    """Writes the answer to one request, whole or as the events of a stream.

    Of a stream come, in this order: ``opening``; for each choice as it goes ``piece``s and,
    once its ``finish_reason`` is set, ``end``; ``closing``. Or ``error``, at any time after
    ``opening``, as the last. What they return is sent as it is; it may be empty.
    """

    id: str
    keep_alive: bytes
    """What is sent to show that nothing is lost but time."""

    def whole(self, generation: Generation, pieces: Sequence[Piece]) -> bytes:
        """The answer of a finished ``generation``, whose choices say ``pieces``."""

    def opening(self, generation: Generation) -> bytes: ...

    def piece(self, generation: Generation, choice: Choice, piece: Piece) -> bytes: ...

    def end(self, generation: Generation, choice: Choice) -> bytes: ...

    def closing(self, generation: Generation) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


_Whole = TypeVar("_Whole", ChatChoice, TextChoice)
_Part = TypeVar("_Part", ChatChunkChoice, TextChoice)


class Shape(Protocol[_Whole, _Part]):
    """What the answers of one of OpenAI's endpoints are, and how one choice looks in them."""

    id_prefix: str

    def whole(
        self,
        head: Head,
        choices: list[_Whole],
        usage: UsageBody,
        prompt: PromptLogprobs | UnsetType,
    ) -> Head:
        """A whole answer."""

    def chunk(self, head: Head, choices: list[_Part], usage: UsageBody | UnsetType | None) -> Head:
        """One of a stream."""

    def choice(
        self,
        index: int,
        piece: Piece,
        finish_reason: FinishReason,
        details: Details,
        prompt: PromptLogprobs | UnsetType,
    ) -> _Whole:
        """In a whole answer."""

    def opening(self, index: int) -> _Part | None:
        """The first chunk, where there is one before any text."""

    def delta(
        self, index: int, piece: Piece, finish_reason: FinishReason | None, details: Details
    ) -> _Part:
        """In a chunk."""


class ChatShape:
    id_prefix = "chatcmpl-"

    def whole(
        self,
        head: Head,
        choices: list[ChatChoice],
        usage: UsageBody,
        prompt: PromptLogprobs | UnsetType,
    ) -> Head:
        return ChatCompletion(**asdict(head), choices=choices, usage=usage, prompt_logprobs=prompt)

    def chunk(
        self, head: Head, choices: list[ChatChunkChoice], usage: UsageBody | UnsetType | None
    ) -> Head:
        return ChatCompletionChunk(**asdict(head), choices=choices, usage=usage)

    def choice(
        self,
        index: int,
        piece: Piece,
        finish_reason: FinishReason,
        details: Details,
        prompt: PromptLogprobs | UnsetType,
    ) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=_message(piece),
            logprobs=self._logprobs(piece, details),
            finish_reason=finish_reason,
        )

    def opening(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=MessageDelta(role="assistant", content=""))

    def delta(
        self, index: int, piece: Piece, finish_reason: FinishReason | None, details: Details
    ) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=_delta(piece),
            logprobs=self._logprobs(piece, details) if piece else None,
            finish_reason=finish_reason,
        )

    def _logprobs(self, piece: Piece, details: Details) -> ChatLogprobs | None:
        return None if piece.tokens is None else chat_logprobs(piece.tokens, details)


def _message(piece: Piece) -> AnswerMessage:
    calls = [
        AnswerToolCall(id=call.id or "", function=AnswerFunction(call.name or "", call.arguments))
        for call in piece.calls
    ]
    return AnswerMessage(
        content=None if calls and not piece.text else piece.text,
        reasoning_content=piece.reasoning or UNSET,
        reasoning=piece.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _delta(piece: Piece) -> MessageDelta:
    calls = [
        ToolCallDelta(
            index=call.number,
            id=call.id,
            type="function" if call.id is not None else None,
            function=FunctionDelta(call.name, call.arguments),
        )
        for call in piece.calls
    ]
    return MessageDelta(
        content=piece.text or None,
        reasoning_content=piece.reasoning or None,
        reasoning=piece.reasoning or None,
        tool_calls=calls or None,
    )


class TextShape:
    id_prefix = "cmpl-"

    def whole(
        self,
        head: Head,
        choices: list[TextChoice],
        usage: UsageBody,
        prompt: PromptLogprobs | UnsetType,
    ) -> Head:
        return self.chunk(head, choices, usage)  # prompts are in the choices

    def chunk(
        self, head: Head, choices: list[TextChoice], usage: UsageBody | UnsetType | None
    ) -> Head:
        return TextCompletion(**asdict(head), choices=choices, usage=usage)

    def choice(
        self,
        index: int,
        piece: Piece,
        finish_reason: FinishReason,
        details: Details,
        prompt: PromptLogprobs | UnsetType,
    ) -> TextChoice:
        choice = self.delta(index, piece, finish_reason, details)
        return replace(choice, prompt_logprobs=prompt)

    def opening(self, index: int) -> None:
        return None

    def delta(
        self, index: int, piece: Piece, finish_reason: FinishReason | None, details: Details
    ) -> TextChoice:
        logprobs = None if piece.tokens is None else text_logprobs(piece.tokens, details)
        return TextChoice(
            index=index, text=piece.text, logprobs=logprobs, finish_reason=finish_reason
        )


class CompletionWriter(Generic[_Whole, _Part]):
    """An `AnswerWriter` for OpenAI's completions of both kinds."""

    keep_alive = b": keep-alive\n\n"

    def __init__(
        self, shape: Shape[_Whole, _Part], model: str, fingerprint: str, *, usage_event: bool
    ) -> None:
        self._shape: Shape[_Whole, _Part] = shape
        self.id = shape.id_prefix + uuid.uuid4().hex
        self._head = Head(
            id=self.id,
            created=int(time.time()),
            model=model,
            system_fingerprint="fp_" + fingerprint[:12],
        )
        self._usage_event = usage_event

    def whole(self, generation: Generation, pieces: Sequence[Piece]) -> bytes:
        choices: list[_Whole] = []
        prompt: PromptLogprobs | UnsetType = UNSET
        for choice, piece in zip(generation.choices, pieces, strict=True):
            reason = choice.finish_reason
            assert reason is not None  # `generation` has finished
            prompt = generation.prompt_logprobs(choice)
            choices.append(
                self._shape.choice(choice.index, piece, reason, generation.details, prompt)
            )
        return msgspec.json.encode(
            self._shape.whole(self._head, choices, generation.usage(), prompt)
        )

    def opening(self, generation: Generation) -> bytes:
        opening = [self._shape.opening(choice.index) for choice in generation.choices]
        return b"".join(self._event(choice) for choice in opening if choice is not None)

    def piece(self, generation: Generation, choice: Choice, piece: Piece) -> bytes:
        return self._event(self._shape.delta(choice.index, piece, None, generation.details))

    def end(self, generation: Generation, choice: Choice) -> bytes:
        reason = choice.finish_reason
        return self._event(self._shape.delta(choice.index, Piece(), reason, generation.details))

    def closing(self, generation: Generation) -> bytes:
        usage = self._chunk([], generation.usage()) if self._usage_event else b""
        return usage + as_event(DONE.encode())

    def error(self, error: ApiError) -> bytes:
        return as_event(error.body())

    def _event(self, choice: _Part) -> bytes:
        # OpenAI's chunks have "usage": null when the usage comes at the end.
        return self._chunk([choice], None if self._usage_event else UNSET)

    def _chunk(self, choices: list[_Part], usage: UsageBody | UnsetType | None) -> bytes:
        return as_event(msgspec.json.encode(self._shape.chunk(self._head, choices, usage)))
