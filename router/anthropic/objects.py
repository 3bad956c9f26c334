"""Answers and stream events of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class TokenCount(Struct, frozen=True):
    input_tokens: int


class AnthropicOutputTokensDetails(Struct, frozen=True):
    thinking_tokens: int


class AnthropicUsage(Struct, frozen=True, kw_only=True):
    input_tokens: Annotated[int, Meta(description="Without those read from the cache.")]
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputTokensDetails
    service_tier: Literal["standard"] = "standard"


class TextBlock(Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class AnthropicMessage(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


# -- events --------------------------------------------------------------------


class TextDelta(Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class MessageStartEvent(Struct, frozen=True, tag="message_start"):
    message: AnthropicMessage


class ContentBlockStartEvent(Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class PingEvent(Struct, frozen=True, tag="ping"):
    pass


class ContentBlockDeltaEvent(Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStopEvent(Struct, frozen=True, tag="content_block_stop"):
    index: int


class StopDelta(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDeltaEvent(Struct, frozen=True, tag="message_delta"):
    delta: StopDelta
    usage: AnthropicUsage


class MessageStopEvent(Struct, frozen=True, tag="message_stop"):
    pass


MessageStreamEvent = (
    MessageStartEvent
    | ContentBlockStartEvent
    | PingEvent
    | ContentBlockDeltaEvent
    | ContentBlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
)
