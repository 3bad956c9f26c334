"""The bodies of requests and answers, as Anthropic's Messages API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.schemas.conversation import MAX_TOOLS, ToolName
from router.schemas.requests import (
    MAX_STOP_STRINGS,
    Count,
    SamplingRequest,
    StopString,
)

# -- requests ------------------------------------------------------------------


class ContentBlockParam(Struct, frozen=True, kw_only=True):
    """A content block of any type; which fields it has to have depends on that.
    ``cache_control``, ``citations`` and ``signature`` are accepted and mean nothing here."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None
    content: str | list[ContentBlockParam] | dict[str, Any] | None = None


class MessageParam(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlockParam]


class AnthropicTool(Struct, frozen=True, kw_only=True):
    """A tool of the client's; every other ``type`` is one of Anthropic's own."""

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, frozen=True, kw_only=True):
    """The budget is told to the chat template, which may know what to do with it.
    Of thinking whose ``display`` is ``omitted`` only that there was some is shown."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True, kw_only=True):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: Annotated[str, Meta(max_length=64)] | None = None
    format: OutputFormat | None = None


class Metadata(Struct, frozen=True, kw_only=True):
    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class CountTokensRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation. How it would go on may be given, and does not matter."""

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=100_000)]
    system: str | list[ContentBlockParam] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None

    container: Any = None
    mcp_servers: Any = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """Beside Anthropic's own fields those of `SamplingRequest`."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


# -- answers -------------------------------------------------------------------


class TokenCount(Struct, frozen=True):
    input_tokens: int


class AnthropicOutputTokensDetails(Struct, frozen=True):
    thinking_tokens: int


class AnthropicUsage(Struct, frozen=True, kw_only=True):
    """``input_tokens`` are those that were not read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputTokensDetails
    service_tier: Literal["standard"] = "standard"


class TextBlock(Struct, frozen=True, tag="text"):
    text: str
    citations: None = None


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
