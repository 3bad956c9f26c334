"""Answers of OpenAI's completions: JSON, or a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from router.api.sse import encode_event
from router.errors import ApiError
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation
from router.schemas.completions import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionFunctionCall,
    ChatCompletionMessage,
    ChatCompletionToolCall,
    ChatLogprobs,
    CompletionHeader,
    CompletionUsage,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FinishReason,
    PromptLogprobs,
    TextChoice,
    TextCompletion,
)
from router.tokens.logprobs import LogprobsContext, chat_logprobs, text_logprobs

DONE = "[DONE]"
"""The data of the event that ends a stream."""


_FullChoice = TypeVar("_FullChoice", ChatChoice, TextChoice)
_ChunkChoice = TypeVar("_ChunkChoice", ChatChunkChoice, TextChoice)


class CompletionFormat(Protocol[_FullChoice, _ChunkChoice]):
    """What the answers of one of OpenAI's endpoints are, and how one choice looks in them."""

    id_prefix: str

    def full_response(
        self,
        header: CompletionHeader,
        choices: list[_FullChoice],
        usage: CompletionUsage,
        prompt: PromptLogprobs | UnsetType,
    ) -> CompletionHeader:
        """A whole answer."""

    def chunk(
        self,
        header: CompletionHeader,
        choices: list[_ChunkChoice],
        usage: CompletionUsage | UnsetType | None,
    ) -> CompletionHeader:
        """One of a stream."""

    def choice(
        self,
        index: int,
        delta: OutputDelta,
        finish_reason: FinishReason,
        context: LogprobsContext,
        prompt: PromptLogprobs | UnsetType,
    ) -> _FullChoice:
        """In a whole answer."""

    def first_chunk_choice(self, index: int) -> _ChunkChoice | None:
        """The first chunk, where there is one before any text."""

    def chunk_choice(
        self,
        index: int,
        delta: OutputDelta,
        finish_reason: FinishReason | None,
        context: LogprobsContext,
    ) -> _ChunkChoice:
        """In a chunk."""


class ChatCompletionFormat:
    id_prefix = "chatcmpl-"

    def full_response(
        self,
        header: CompletionHeader,
        choices: list[ChatChoice],
        usage: CompletionUsage,
        prompt: PromptLogprobs | UnsetType,
    ) -> CompletionHeader:
        return ChatCompletion(
            **asdict(header), choices=choices, usage=usage, prompt_logprobs=prompt
        )

    def chunk(
        self,
        header: CompletionHeader,
        choices: list[ChatChunkChoice],
        usage: CompletionUsage | UnsetType | None,
    ) -> CompletionHeader:
        return ChatCompletionChunk(**asdict(header), choices=choices, usage=usage)

    def choice(
        self,
        index: int,
        delta: OutputDelta,
        finish_reason: FinishReason,
        context: LogprobsContext,
        prompt: PromptLogprobs | UnsetType,
    ) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=_message(delta),
            logprobs=self._logprobs(delta, context),
            finish_reason=finish_reason,
        )

    def first_chunk_choice(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=DeltaMessage(role="assistant", content=""))

    def chunk_choice(
        self,
        index: int,
        delta: OutputDelta,
        finish_reason: FinishReason | None,
        context: LogprobsContext,
    ) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=_delta(delta),
            logprobs=self._logprobs(delta, context) if delta else None,
            finish_reason=finish_reason,
        )

    def _logprobs(self, delta: OutputDelta, context: LogprobsContext) -> ChatLogprobs | None:
        return None if delta.tokens is None else chat_logprobs(delta.tokens, context)


def _message(delta: OutputDelta) -> ChatCompletionMessage:
    calls = [
        ChatCompletionToolCall(
            id=call.id or "", function=ChatCompletionFunctionCall(call.name or "", call.arguments)
        )
        for call in delta.calls
    ]
    return ChatCompletionMessage(
        content=None if calls and not delta.text else delta.text,
        reasoning_content=delta.reasoning or UNSET,
        reasoning=delta.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _delta(delta: OutputDelta) -> DeltaMessage:
    calls = [
        DeltaToolCall(
            index=call.number,
            id=call.id,
            type="function" if call.id is not None else None,
            function=DeltaFunctionCall(call.name, call.arguments),
        )
        for call in delta.calls
    ]
    return DeltaMessage(
        content=delta.text or None,
        reasoning_content=delta.reasoning or None,
        reasoning=delta.reasoning or None,
        tool_calls=calls or None,
    )


class TextCompletionFormat:
    id_prefix = "cmpl-"

    def full_response(
        self,
        header: CompletionHeader,
        choices: list[TextChoice],
        usage: CompletionUsage,
        prompt: PromptLogprobs | UnsetType,
    ) -> CompletionHeader:
        return self.chunk(header, choices, usage)  # prompts are in the choices

    def chunk(
        self,
        header: CompletionHeader,
        choices: list[TextChoice],
        usage: CompletionUsage | UnsetType | None,
    ) -> CompletionHeader:
        return TextCompletion(**asdict(header), choices=choices, usage=usage)

    def choice(
        self,
        index: int,
        delta: OutputDelta,
        finish_reason: FinishReason,
        context: LogprobsContext,
        prompt: PromptLogprobs | UnsetType,
    ) -> TextChoice:
        choice = self.chunk_choice(index, delta, finish_reason, context)
        return replace(choice, prompt_logprobs=prompt)

    def first_chunk_choice(self, index: int) -> None:
        return None

    def chunk_choice(
        self,
        index: int,
        delta: OutputDelta,
        finish_reason: FinishReason | None,
        context: LogprobsContext,
    ) -> TextChoice:
        logprobs = None if delta.tokens is None else text_logprobs(delta.tokens, context)
        return TextChoice(
            index=index, text=delta.text, logprobs=logprobs, finish_reason=finish_reason
        )


class CompletionWriter(Generic[_FullChoice, _ChunkChoice]):
    """An `OutputWriter` for OpenAI's completions of both kinds."""

    keep_alive = b": keep-alive\n\n"

    def __init__(
        self,
        format: CompletionFormat[_FullChoice, _ChunkChoice],
        model: str,
        fingerprint: str,
        *,
        include_usage: bool,
    ) -> None:
        self._format: CompletionFormat[_FullChoice, _ChunkChoice] = format
        self.id = format.id_prefix + uuid.uuid4().hex
        self._header = CompletionHeader(
            id=self.id,
            created=int(time.time()),
            model=model,
            system_fingerprint="fp_" + fingerprint[:12],
        )
        self._include_usage = include_usage

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> bytes:
        choices: list[_FullChoice] = []
        prompt: PromptLogprobs | UnsetType = UNSET
        for choice, delta in zip(generation.choices, deltas, strict=True):
            reason = choice.finish_reason
            assert reason is not None  # `generation` has finished
            prompt = generation.prompt_logprobs(choice)
            choices.append(
                self._format.choice(
                    choice.index, delta, reason, generation.logprobs_context, prompt
                )
            )
        return msgspec.json.encode(
            self._format.full_response(self._header, choices, generation.usage(), prompt)
        )

    def stream_start(self, generation: Generation) -> bytes:
        opening = [self._format.first_chunk_choice(choice.index) for choice in generation.choices]
        return b"".join(self._event(choice) for choice in opening if choice is not None)

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        return self._event(
            self._format.chunk_choice(choice.index, delta, None, generation.logprobs_context)
        )

    def choice_end(self, generation: Generation, choice: Choice) -> bytes:
        reason = choice.finish_reason
        return self._event(
            self._format.chunk_choice(
                choice.index, OutputDelta(), reason, generation.logprobs_context
            )
        )

    def stream_end(self, generation: Generation) -> bytes:
        usage = self._chunk([], generation.usage()) if self._include_usage else b""
        return usage + encode_event(DONE.encode())

    def error(self, error: ApiError) -> bytes:
        return encode_event(error.body())

    def _event(self, choice: _ChunkChoice) -> bytes:
        # OpenAI's chunks have "usage": null when the usage comes at the end.
        return self._chunk([choice], None if self._include_usage else UNSET)

    def _chunk(
        self, choices: list[_ChunkChoice], usage: CompletionUsage | UnsetType | None
    ) -> bytes:
        return encode_event(msgspec.json.encode(self._format.chunk(self._header, choices, usage)))
