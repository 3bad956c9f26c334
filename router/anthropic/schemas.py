"""Request bodies of Anthropic's Messages API."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.schemas.body import Count, other_name, refused
from router.schemas.conversation import MAX_TOOLS, ToolName
from router.schemas.requests import MAX_STOP_STRINGS, StopString
from router.schemas.sampling import SamplingRequest

BLOCK_TYPES = (
    *("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    *("search_result", "tool_reference", "compaction"),
)
_SEARCH = re.compile(r"tools?[_-]?search|search[_-]?tool", re.IGNORECASE)
_MEDIA = ("image", "document", "audio", "input_audio", "video", "file")
"""Content that the model cannot read is refused, not left out: a question may be about it."""


class BlockSource(Struct, frozen=True, kw_only=True):
    """The source of an image or document: ``data`` (base64, or plain text for a document of type
    ``text``), ``url``, or blocks in ``content``."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[ContentBlockParam] | None = None


class ContentBlockParam(Struct, frozen=True, kw_only=True):
    """A content block of any type. The type decides which fields are required. A block of a tool
    that Anthropic runs becomes text. ``cache_control``, ``citations`` and ``signature`` are
    accepted and have no effect."""

    type: str
    source: BlockSource | str | None = None
    title: str | None = None
    url: str | None = None
    context: str | None = None
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    server_name: str | None = None
    tool_name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None
    content: str | list[ContentBlockParam] | dict[str, Any] | None = None

    def image_chars(self, depth: int = 3) -> int:
        """Return the number of characters of the images in this block and the blocks nested in it:
        an image in a document in a tool result has ``depth`` 3."""
        source, inner = self.source, self.content
        blocks = inner if isinstance(inner, list) else []
        if isinstance(source, BlockSource) and isinstance(source.content, list):
            blocks = [*blocks, *source.content]
        data = source.data if isinstance(source, BlockSource) and self.type == "image" else ""
        own = len(data or "")
        return own + sum(block.image_chars(depth - 1) for block in blocks if depth > 1)

    @property
    def is_foreign(self) -> bool:
        """Whether the block is of a type that this server has no use for."""
        return self.type not in (*BLOCK_TYPES, *_MEDIA)


class MessageParam(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlockParam]


class AnthropicTool(Struct, frozen=True, kw_only=True):
    """A tool of the client. A ``type`` other than ``custom`` is one of Anthropic's own tools,
    which this server ignores. ``defer_loading`` leaves a tool out of the prompt until a
    ``tool_reference`` names it, if one of the other tools searches tools."""

    name: ToolName | None = None
    type: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    @property
    def is_anthropics(self) -> bool:
        """Whether Anthropic or an MCP server that it calls defines the tool."""
        return self.type not in (None, "custom")

    @property
    def searches_tools(self) -> bool:
        return not self.is_anthropics and bool(_SEARCH.search(self.name or ""))


class AnthropicToolChoice(Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct, frozen=True, kw_only=True):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: Annotated[str, Meta(max_length=64)] | None = None
    format: OutputFormat | None = None


class ThinkingConfig(Struct, frozen=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: (
        Annotated[
            Count,
            Meta(description="Max tokens of reasoning. Also passed to the chat template."),
        ]
        | None
    ) = None
    display: (
        Annotated[
            str,
            Meta(
                max_length=64,
                description="``omitted`` leaves the text out of thinking blocks; any other "
                "value shows it.",
            ),
        ]
        | None
    ) = None


class Metadata(Struct, frozen=True, kw_only=True):
    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class CountTokensRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation. Fields that concern the answer are accepted and have no effect."""

    may_have_images = True

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=100_000)]
    system: str | list[ContentBlockParam] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None

    container: Annotated[Any, refused()] = None
    mcp_servers: Annotated[Any, refused([])] = None

    @property
    def image_chars(self) -> int:
        return sum(
            block.image_chars()
            for message in self.messages
            if isinstance(message.content, list)
            for block in message.content
        )

    @property
    def left_out_tools(self) -> list[str]:
        return [tool.type or "" for tool in self.tools or () if tool.is_anthropics]

    @property
    def left_out_items(self) -> list[str]:
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for each in contents if isinstance(each, list) for block in each]
        results = [block.content for block in blocks if block.type == "tool_result"]
        blocks += [block for each in results if isinstance(each, list) for block in each]
        return [block.type for block in blocks if block.is_foreign]


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to answer: Anthropic's fields and those of `SamplingRequest`."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop: Annotated[list[str] | None, other_name("stop_sequences", [])] = None
    metadata: Metadata | None = None
    service_tier: str | None = None
