"""The objects in answers of OpenAI's completion endpoints, complete and as chunks of a stream."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: Annotated[
        int, Meta(description="Tokens of `prediction` that were drafted and accepted.")
    ] = 0
    rejected_prediction_tokens: Annotated[
        int,
        Meta(
            description="Tokens of `prediction` that were drafted and rejected; they are not "
            "included in other counts."
        ),
    ] = 0


class CompletionUsage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class ComputedPrompt(Struct, frozen=True, kw_only=True):
    """How much of a prompt is computed: llama.cpp's answer to ``return_progress``."""

    total: Annotated[int, Meta(description="Tokens of the prompt.")]
    cache: Annotated[int, Meta(description="Of these, the ones found in a cache.")]
    processed: Annotated[int, Meta(description="Those found or computed.")]
    time_ms: Annotated[int, Meta(description="Since an engine got the prompt.")]


class TopLogprob(Struct, frozen=True, kw_only=True):
    """A token and its log-probability."""

    token: Annotated[str, Meta(description="May contain replacement characters; `bytes` is exact.")]
    logprob: float
    bytes: list[int]


class ChatCompletionTokenLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatCompletionTokenLogprob]
    refusal: None = None


class TextLogprobs(Struct, frozen=True, kw_only=True):
    """Parallel lists. The entry of the first token of a prompt is null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: Annotated[list[int], Meta(description="In characters.")]


class PromptLogprob(Struct, frozen=True, kw_only=True):
    logprob: float
    rank: Annotated[
        int | None, Meta(description="1: the most likely. Null: not among the top tokens.")
    ]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, the token and its alternatives by token id. The first is None."""


class ChatCompletionFunctionCall(Struct, frozen=True):
    name: str
    arguments: str


class ChatCompletionToolCall(Struct, frozen=True, kw_only=True):
    id: str
    function: ChatCompletionFunctionCall
    type: Literal["function"] = "function"


class ChatCompletionMessage(Struct, frozen=True, kw_only=True):
    """An answer. Its reasoning has two names."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, Meta(description="Null if there are only tool calls.")]
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCompletionToolCall] | UnsetType = UNSET
    refusal: None = None


class DeltaFunctionCall(Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | UnsetType = UNSET


class DeltaToolCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a tool call. Only the first part has ``id``, ``type`` and the name of
    the function."""

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
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Annotated[
        FinishReason | None, Meta(description="Null until the last chunk of a choice.")
    ]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionHeader(Struct, frozen=True, kw_only=True):
    """The first fields of every answer, equal in all chunks of a stream."""

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
    """A chunk of a stream. ``usage`` is null in all but the last chunk, and absent if not
    requested. A chunk with ``prompt_progress`` has an empty delta."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_progress: ComputedPrompt | UnsetType = UNSET


class TextCompletion(CompletionHeader, frozen=True, kw_only=True):
    """A complete answer or a chunk of a stream, with ``usage`` and ``prompt_progress`` as in chunks
    of chats."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_progress: ComputedPrompt | UnsetType = UNSET
