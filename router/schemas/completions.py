"""The objects that OpenAI's completions are answered with, whole and as chunks of a stream."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class CompletionUsage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TopLogprob(Struct, frozen=True, kw_only=True):
    """A token and how likely it was; its text may have half characters, its bytes are exact."""

    token: str
    logprob: float
    bytes: list[int]


class ChatCompletionTokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatCompletionTokenLogprob]
    refusal: None = None


class TextLogprobs(Struct, frozen=True, kw_only=True):
    """Parallel lists; ``text_offset`` counts characters. A prompt's first token has None."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """``rank`` is 1 for the most likely token, None for one that is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt but the first: by token id, itself and its alternatives."""


class ChatCompletionFunctionCall(Struct, frozen=True):
    name: str
    arguments: str


class ChatCompletionToolCall(Struct, frozen=True, kw_only=True):
    id: str
    function: ChatCompletionFunctionCall
    type: Literal["function"] = "function"


class ChatCompletionMessage(Struct, frozen=True, kw_only=True):
    """``content`` is None where there are only calls. Reasoning has two names."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCompletionToolCall] | UnsetType = UNSET
    refusal: None = None


class DeltaFunctionCall(Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | UnsetType = UNSET


class DeltaToolCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``id``, ``type`` and the function's name come with the first of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunctionCall


class DeltaMessage(Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextChoice(Struct, frozen=True, kw_only=True):
    """``finish_reason`` is None in the chunks before a choice's last one."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionHeader(Struct, frozen=True, kw_only=True):
    """What every answer begins with; all chunks of a stream have the same."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(CompletionHeader, frozen=True, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(CompletionHeader, frozen=True, kw_only=True):
    """``usage`` is None in all but the last chunk, and absent when it was not asked for."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET


class TextCompletion(CompletionHeader, frozen=True, kw_only=True):
    """A whole answer or a chunk, which has ``usage`` as those of chats have it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
