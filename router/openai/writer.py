"""Answers of OpenAI's completion endpoints: JSON, or a stream of chunks."""

from __future__ import annotations

import itertools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import asdict, replace

from router.api.sse import MEDIA_TYPE, encode_event
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
    ComputedPrompt,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FinishReason,
    PromptLogprobs,
    TextChoice,
    TextCompletion,
)
from router.schemas.requests import ChatRequest, GenerationRequest
from router.tokens.logprobs import chat_logprobs, text_logprobs
from router.tokens.reply_parser import ReplyDelta

DONE = "[DONE]"
"""The data of the event that ends a stream."""

_MARK = uuid.uuid4().hex
"""A text that no client can put into a chunk."""

_PLACE = f'"{_MARK}"'.encode()

_FullChoice = TypeVar("_FullChoice")
_ChunkChoice = TypeVar("_ChunkChoice")


class CompletionWriter(ABC, Generic[_FullChoice, _ChunkChoice]):
    """An `OutputWriter` of one request. Subclasses define the format of answers and chunks."""

    id_prefix: ClassVar[str]
    stream_type = MEDIA_TYPE
    keep_alive = b": keep-alive\n\n"
    repeats_request = False

    def __init__(self, body: GenerationRequest, model: str) -> None:
        self.id = self.id_prefix + uuid.uuid4().hex
        header = CompletionHeader(
            id=self.id,
            created=int(time.time()),
            model=model,
            system_fingerprint="",  # of the engine
        )
        self._header = asdict(header)
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage
        self._text_frames: dict[int, tuple[bytes, bytes]] = {}
        """By choice: the JSON around the text of a chunk that contains only text."""
        self._spliced: list[bytes] = []
        """JSON that replaces the `_PLACE`s in a complete answer."""

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> list[bytes]:
        self._set_fingerprint(generation)
        pairs = zip(generation.choices, deltas, strict=True)
        # Choices are encoded one by one: the encoder lets no other thread run, and a choice may
        # have megabytes.
        choices = [
            Raw(msgspec.json.encode(self._full_choice(generation, choice, delta)))
            for choice, delta in pairs
        ]
        # Several choices may share the log-probabilities of a prompt, which are megabytes.
        whole = self._full(generation, cast(list[_FullChoice], choices))
        pieces = msgspec.json.encode(whole).split(_PLACE)
        spliced = itertools.chain(self._spliced, [b""])
        return [each for pair in zip(pieces, spliced, strict=True) for each in pair]

    def opening(self) -> bytes:
        return b""

    def stream_start(self, generation: Generation) -> bytes:
        self._set_fingerprint(generation)
        return b""

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        return b"".join(self._piece(generation, choice, each) for each in delta.split())

    def _piece(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        if (
            delta.progress is not None
            or delta.tokens is not None
            or delta.reasoning
            or delta.calls
            or self._continuous_usage
        ):
            written = self._chunk_choice(generation, choice.index, delta, None)
            return self._event(generation, written, delta.progress or UNSET)
        start, end = self._text_frame(generation, choice.index)
        return encode_event(start + msgspec.json.encode(delta.text) + end)

    def choice_end(self, generation: Generation, choice: Choice) -> bytes:
        index, reason = choice.index, choice.finish_reason
        chunk = self._chunk_choice(generation, index, OutputDelta(), reason)
        return self._event(generation, chunk)

    def stream_end(self, generation: Generation) -> bytes:
        end = encode_event(DONE.encode())
        if not self._include_usage:
            return end
        return encode_event(msgspec.json.encode(self._chunk([], generation.usage()))) + end

    def error(self, error: ApiError) -> bytes:
        return encode_event(error.body())

    def _set_fingerprint(self, generation: Generation) -> None:
        self._header["system_fingerprint"] = "fp_" + generation.model.hello.fingerprint[:12]

    def _event(
        self,
        generation: Generation,
        choice: _ChunkChoice,
        progress: ComputedPrompt | UnsetType = UNSET,
    ) -> bytes:
        return encode_event(self._chunk_json(generation, choice, progress))

    def _chunk_json(
        self,
        generation: Generation,
        choice: _ChunkChoice,
        progress: ComputedPrompt | UnsetType = UNSET,
    ) -> bytes:
        # OpenAI's chunks have "usage": null if the usage comes at the end.
        usage: CompletionUsage | UnsetType | None = None if self._include_usage else UNSET
        if self._continuous_usage:
            usage = generation.usage()
        return msgspec.json.encode(self._chunk([choice], usage, progress))

    def _text_frame(self, generation: Generation, index: int) -> tuple[bytes, bytes]:
        if index not in self._text_frames:
            marked = OutputDelta((ReplyDelta(text=_MARK),))
            choice = self._chunk_choice(generation, index, marked, None)
            start, end = self._chunk_json(generation, choice).split(_PLACE)
            self._text_frames[index] = start, end
        return self._text_frames[index]

    def _prompt_logprobs(
        self, generation: Generation, choice: Choice
    ) -> PromptLogprobs | UnsetType:
        found = generation.prompt_logprobs(choice)
        if found is None:
            return UNSET
        self._spliced.append(found)
        return cast(PromptLogprobs, _MARK)

    @abstractmethod
    def _full(self, generation: Generation, choices: list[_FullChoice]) -> CompletionHeader:
        """Return the complete answer."""

    @abstractmethod
    def _full_choice(
        self, generation: Generation, choice: Choice, delta: OutputDelta
    ) -> _FullChoice:
        """Return ``choice`` of a complete answer; ``delta`` is its whole output."""

    @abstractmethod
    def _chunk(
        self,
        choices: list[_ChunkChoice],
        usage: CompletionUsage | UnsetType | None,
        progress: ComputedPrompt | UnsetType = UNSET,
    ) -> CompletionHeader:
        """Return a chunk of a stream."""

    @abstractmethod
    def _chunk_choice(
        self, generation: Generation, index: int, delta: OutputDelta, reason: FinishReason | None
    ) -> _ChunkChoice:
        """Return the choice ``index`` of a chunk; ``reason`` is None until it ends."""


class ChatCompletionWriter(CompletionWriter[ChatChoice, ChatChunkChoice]):
    id_prefix = "chatcmpl-"

    def __init__(self, body: ChatRequest, model: str) -> None:
        super().__init__(body, model)
        self._hides_reasoning = body.hides_reasoning

    def _full(self, generation: Generation, choices: list[ChatChoice]) -> ChatCompletion:
        # A chat has one prompt, shared by all choices.
        prompt_logprobs = self._prompt_logprobs(generation, generation.choices[0])
        return ChatCompletion(
            **self._header,
            choices=choices,
            usage=generation.usage(),
            prompt_logprobs=prompt_logprobs,
        )

    def _full_choice(
        self, generation: Generation, choice: Choice, delta: OutputDelta
    ) -> ChatChoice:
        assert choice.finish_reason is not None  # `generation` has finished
        return ChatChoice(
            index=choice.index,
            message=_message(delta.without_reasoning() if self._hides_reasoning else delta),
            logprobs=_logprobs(generation, delta),
            finish_reason=choice.finish_reason,
        )

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        if self._hides_reasoning:
            delta = delta.without_reasoning()
            if not delta:
                return b""
        return super().delta(generation, choice, delta)

    def stream_start(self, generation: Generation) -> bytes:
        opening = DeltaMessage(role="assistant", content="")
        return super().stream_start(generation) + b"".join(
            self._event(generation, ChatChunkChoice(index=choice.index, delta=opening))
            for choice in generation.choices
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: CompletionUsage | UnsetType | None,
        progress: ComputedPrompt | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            **self._header, choices=choices, usage=usage, prompt_progress=progress
        )

    def _chunk_choice(
        self, generation: Generation, index: int, delta: OutputDelta, reason: FinishReason | None
    ) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=_delta_message(delta),
            logprobs=_logprobs(generation, delta),
            finish_reason=reason,
        )


def _logprobs(generation: Generation, delta: OutputDelta) -> ChatLogprobs | None:
    if delta.tokens is None:
        return None
    return chat_logprobs(delta.tokens, generation.logprobs_context)


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


def _delta_message(delta: OutputDelta) -> DeltaMessage:
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


class TextCompletionWriter(CompletionWriter[TextChoice, TextChoice]):
    id_prefix = "cmpl-"

    def _full(self, generation: Generation, choices: list[TextChoice]) -> TextCompletion:
        return self._chunk(choices, generation.usage())

    def _full_choice(
        self, generation: Generation, choice: Choice, delta: OutputDelta
    ) -> TextChoice:
        return replace(
            self._chunk_choice(generation, choice.index, delta, choice.finish_reason),
            prompt_logprobs=self._prompt_logprobs(generation, choice),
        )

    def _chunk(
        self,
        choices: list[TextChoice],
        usage: CompletionUsage | UnsetType | None,
        progress: ComputedPrompt | UnsetType = UNSET,
    ) -> TextCompletion:
        return TextCompletion(
            **self._header, choices=choices, usage=usage, prompt_progress=progress
        )

    def _chunk_choice(
        self, generation: Generation, index: int, delta: OutputDelta, reason: FinishReason | None
    ) -> TextChoice:
        tokens = delta.tokens
        return TextChoice(
            index=index,
            text=delta.text,
            logprobs=None if tokens is None else text_logprobs(tokens, generation.logprobs_context),
            finish_reason=reason,
        )
