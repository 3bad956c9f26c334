"""Request bodies of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from router.errors import InvalidRequest
from router.schemas.conversation import MAX_TOOLS, ToolName
from router.schemas.requests import Count, LogprobsCount, SamplingRequest

MAX_ITEMS = 10_000


class ItemContentPart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an item's content, of any type. Only text is accepted."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of any type. The type decides which fields are required. An item without a type
    is a message, or a reference if it has nothing but an ``id``."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    status: str | None = None
    content: str | list[ItemContentPart] | None = None
    summary: list[ItemContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    output: str | list[ItemContentPart] | dict[str, Any] | None = None


class FunctionTool(Struct, frozen=True, kw_only=True):
    """A function of the client. Types other than ``function`` are tools that OpenAI runs."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    name: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ResponsesToolChoice], Meta(max_length=MAX_TOOLS)] | None = None


class TextFormat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Struct, frozen=True, kw_only=True):
    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation to answer: OpenAI's fields, and those of `SamplingRequest`."""

    neutral: ClassVar = {"background": (False,), "context_management": ([],)}

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: LogprobsCount | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Any = None
    context_management: Any = None
    conversation: Any = None
    moderation: Any = None
    prompt: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def check(self) -> None:
        text_format = self.text.format if self.text else None
        if text_format and text_format.type == "json_schema" and text_format.schema is None:
            raise InvalidRequest(
                "'text.format' of type 'json_schema' needs a 'schema'.", param="text.format.schema"
            )
