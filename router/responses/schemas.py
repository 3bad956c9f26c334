"""Request bodies of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from router.errors import InvalidRequest, InvalidValue, NotSupported
from router.schemas.body import Count, other_name, refused
from router.schemas.conversation import MAX_SCHEMA_DEPTH, MAX_TOOLS, ToolName, is_deeper
from router.schemas.requests import NO_LIMIT, LogprobsCount, MaxTokens, OwnMaxTokens, StopStrings
from router.schemas.sampling import SamplingRequest

MAX_ITEMS = 10_000
_LEVELS_AROUND_SCHEMA = 4
"""Of a tool in a namespace: two lists and two objects."""
CALL_TYPES = (
    *("function_call", "custom_tool_call", "tool_search_call"),
    *("local_shell_call", "shell_call", "apply_patch_call"),
)
CALL_OUTPUT_TYPES = (
    *("function_call_output", "custom_tool_call_output", "tool_search_output"),
    *("local_shell_call_output", "shell_call_output", "apply_patch_call_output"),
)
_OTHER_TYPES = (
    *("message", "reasoning", "item_reference", "additional_tools", "configuration_update"),
    *("compaction", "context_compaction", "compaction_trigger"),
)
_CLIENT_TOOLS = ("function", "custom", "namespace", "local_shell", "shell", "apply_patch")


class CommandOutcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a command of a `shell` tool ended."""

    type: Literal["exit", "timeout"]
    exit_code: int | None = None


class ItemContentPart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an item's content, of any type. Text is accepted, and ``input_image`` if the model
    accepts images. A part of a `shell` tool's result has no type: it is the output of one command.
    ``detail`` is accepted and has no effect."""

    type: str | None = None
    text: str | None = None
    image_url: str | None = None
    refusal: str | None = None
    stdout: str | None = None
    stderr: str | None = None
    outcome: CommandOutcome | None = None


class TextFormat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Annotated[str, Meta(max_length=64)] | None = None


class ReasoningConfig(Struct, frozen=True, kw_only=True):
    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: Annotated[str, Meta(max_length=64)] | None = None


class InputItem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of any type. The type decides which fields are required. An item without a type is a
    message, or a reference if it has only an ``id``. An item of a tool that OpenAI runs becomes
    text, and so does one of an unknown type."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    status: str | None = None
    content: str | list[ItemContentPart] | None = None
    summary: list[ItemContentPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    output: str | list[ItemContentPart] | dict[str, Any] | None = None
    execution: str | None = None
    tools: list[Any] | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    server_label: str | None = None
    queries: list[Any] | None = None
    results: list[Any] | None = None
    code: str | None = None
    error: Any = None
    approve: bool | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether the item is of a type that this server has no use for."""
        known = (*CALL_TYPES, *CALL_OUTPUT_TYPES, *_OTHER_TYPES)
        return self.type is not None and self.type not in known

    @property
    def image_chars(self) -> int:
        return sum(
            len(part.image_url or "")
            for parts in (self.content, self.output)
            if isinstance(parts, list)
            for part in parts
        )


class ToolFormat(Struct, frozen=True, kw_only=True):
    """The input of a custom tool: any text, or text that matches a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | UnsetType = UNSET
    definition: str | UnsetType = UNSET


class ResponsesTool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs, a ``namespace`` of such tools, or a tool of another type,
    which is ignored. The type decides which fields are required. ``defer_loading`` leaves a tool
    out of the prompt until a ``tool_search_output`` names it, if the client searches tools."""

    type: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
    name: ToolName | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET
    format: ToolFormat | UnsetType | None = UNSET
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | UnsetType = UNSET
    execution: str | UnsetType | None = UNSET
    defer_loading: bool | UnsetType | None = UNSET

    @property
    def is_clients(self) -> bool:
        """Whether the client runs the tool. This server ignores others."""
        return self.type in _CLIENT_TOOLS or self.searches_tools

    @property
    def searches_tools(self) -> bool:
        return self.type == "tool_search" and self.execution == "client"


class ResponsesToolChoice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    name: ToolName | None = None
    namespace: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ResponsesToolChoice], Meta(max_length=MAX_TOOLS)] | None = None


class ContextManagement(Struct, frozen=True, kw_only=True):
    """When the conversation is compacted by itself."""

    type: Literal["compaction"]
    compact_threshold: Annotated[
        Count | None, Meta(description="Tokens of a prompt above which it is compacted.")
    ] = None


_OtherMaxTokens = Annotated[MaxTokens | None, other_name("max_output_tokens", *NO_LIMIT)]


class ResponsesRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation to answer: OpenAI's fields and those of `SamplingRequest`."""

    may_have_images = True

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    store: bool | None = None
    max_output_tokens: OwnMaxTokens = None
    max_tool_calls: Count | None = None
    stop: StopStrings | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
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
    context_management: Annotated[list[ContextManagement], Meta(max_length=8)] | None = None

    background: Annotated[Any, refused(False)] = None
    conversation: Annotated[Any, refused(advice="Use 'previous_response_id'.")] = None
    moderation: Annotated[Any, refused()] = None
    prompt: Annotated[Any, refused(advice="Use 'instructions' and 'input'.")] = None
    max_tokens: _OtherMaxTokens = None
    max_completion_tokens: _OtherMaxTokens = None

    @property
    def image_chars(self) -> int:
        return 0 if isinstance(self.input, str) else sum(each.image_chars for each in self.input)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def wants_sealed_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def left_out_tools(self) -> list[str]:
        return [tool.type for tool in self.tools or () if not tool.is_clients]

    @property
    def left_out_items(self) -> list[str]:
        items = () if isinstance(self.input, str) else self.input
        return [item.type for item in items if item.type is not None and item.is_foreign]

    def check(self) -> None:
        if self.max_output_tokens == 0:
            raise InvalidValue("'max_output_tokens' must be at least 1.", param="max_output_tokens")
        text_format = self.text.format if self.text else None
        if text_format and text_format.type == "json_schema" and text_format.schema is None:
            raise InvalidRequest(
                "'text.format' of type 'json_schema' requires a 'schema'.",
                param="text.format.schema",
            )
        for name in ("text", "tools", "tool_choice"):
            if _is_too_deep(getattr(self, name)):
                raise InvalidValue(f"'{name}' is nested too deeply.", param=name)


class CompactRequest(ResponsesRequest, frozen=True, kw_only=True):
    """A conversation to compact. The fields that concern an answer have no effect."""

    def check(self) -> None:
        super().check()
        if self.stream:
            raise NotSupported("'stream' is not supported here.", param="stream")


def _is_too_deep(field: object) -> bool:
    """Return whether ``field`` is nested deeper than any schema in it may be. The answer repeats
    it within other objects; near the limit of recursion it could be read but not written."""
    try:
        return is_deeper(msgspec.to_builtins(field), MAX_SCHEMA_DEPTH + _LEVELS_AROUND_SCHEMA)
    except RecursionError:
        return True
