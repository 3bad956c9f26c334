"""Answers and stream events of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from router.api.output import BlockStatus
from router.responses.schemas import (
    ReasoningConfig,
    ResponsesTool,
    ResponsesToolChoice,
    TextConfig,
)
from router.schemas.completions import ChatCompletionTokenLogprob

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, frozen=True, kw_only=True, tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatCompletionTokenLogprob]


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(Struct, frozen=True, tag="summary_text"):
    text: str


class MessageItem(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: BlockStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str
    summary: Annotated[
        list[SummaryText], Meta(description="The reasoning text, if a summary was requested.")
    ]
    content: Annotated[
        list[ReasoningText], Meta(description="The reasoning text, if no summary was requested.")
    ]
    encrypted_content: Annotated[
        str | None, Meta(description="The encrypted reasoning, if requested with `include`.")
    ] = None
    status: BlockStatus


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str
    call_id: Annotated[str, Meta(description="The id to which the result of the call refers.")]
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    status: BlockStatus


class CustomCallItem(Struct, frozen=True, kw_only=True, tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str
    status: BlockStatus


class LocalShellAction(Struct, frozen=True, kw_only=True, tag="exec"):
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(Struct, frozen=True, kw_only=True, tag="local_shell_call"):
    id: str
    call_id: str
    action: LocalShellAction
    status: BlockStatus


class ShellAction(Struct, frozen=True, kw_only=True):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCallItem(Struct, frozen=True, kw_only=True, tag="shell_call"):
    id: str
    call_id: str
    action: ShellAction
    status: BlockStatus


class PatchOperation(Struct, frozen=True, kw_only=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | UnsetType = UNSET


class ApplyPatchCallItem(Struct, frozen=True, kw_only=True, tag="apply_patch_call"):
    id: str
    call_id: str
    operation: PatchOperation
    status: BlockStatus


class ToolSearchCallItem(Struct, frozen=True, kw_only=True, tag="tool_search_call"):
    id: str
    call_id: str
    execution: Literal["client"] = "client"
    arguments: dict[str, Any]
    status: BlockStatus


class CompactionItem(Struct, frozen=True, kw_only=True, tag="compaction"):
    id: str
    encrypted_content: Annotated[
        str, Meta(description="The summary, which only this server can read.")
    ]


OutputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | LocalShellCallItem
    | ShellCallItem
    | ApplyPatchCallItem
    | ToolSearchCallItem
    | CompactionItem
)


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Struct, frozen=True, kw_only=True):
    """A response in its current state, with fields of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: TextConfig
    tool_choice: str | ResponsesToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class CompactedResponse(Struct, frozen=True, kw_only=True):
    """A compacted conversation: the user's messages and a summary of everything else."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class ItemList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# -- events --------------------------------------------------------------------


class SequencedEvent(Struct, kw_only=True):
    sequence_number: int = 0
    """Set when the event is sent."""


class ResponseEvent(SequencedEvent, kw_only=True):
    response: ResponseObject


class ResponseCreatedEvent(ResponseEvent, tag="response.created"): ...


class ResponseInProgressEvent(ResponseEvent, tag="response.in_progress"): ...


class ResponseCompletedEvent(ResponseEvent, tag="response.completed"): ...


class ResponseIncompleteEvent(ResponseEvent, tag="response.incomplete"): ...


class ResponseFailedEvent(ResponseEvent, tag="response.failed"): ...


class ResponseErrorEvent(SequencedEvent, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


class ItemEvent(SequencedEvent, kw_only=True):
    output_index: int
    item: OutputItem


class OutputItemAddedEvent(ItemEvent, tag="response.output_item.added"): ...


class OutputItemDoneEvent(ItemEvent, tag="response.output_item.done"): ...


class ItemDetailEvent(SequencedEvent, kw_only=True):
    item_id: str
    output_index: int


class ContentEvent(ItemDetailEvent, kw_only=True):
    content_index: Literal[0] = 0


class ContentPartAddedEvent(ContentEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDoneEvent(ContentEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDeltaEvent(ContentEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatCompletionTokenLogprob]


class TextDoneEvent(ContentEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatCompletionTokenLogprob]


class ReasoningTextDeltaEvent(ContentEvent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDoneEvent(ContentEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class SummaryEvent(ItemDetailEvent, kw_only=True):
    summary_index: Literal[0] = 0


class SummaryPartAddedEvent(
    SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.added"
):
    part: SummaryText


class SummaryPartDoneEvent(SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryTextDeltaEvent(
    SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.delta"
):
    delta: str


class SummaryTextDoneEvent(SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class ArgumentsDeltaEvent(
    ItemDetailEvent, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDoneEvent(
    ItemDetailEvent, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class CustomInputDeltaEvent(
    ItemDetailEvent, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    delta: str


class CustomInputDoneEvent(
    ItemDetailEvent, kw_only=True, tag="response.custom_tool_call_input.done"
):
    input: str


ResponseStreamEvent = (
    ResponseCreatedEvent
    | ResponseInProgressEvent
    | ResponseCompletedEvent
    | ResponseIncompleteEvent
    | ResponseFailedEvent
    | ResponseErrorEvent
    | OutputItemAddedEvent
    | OutputItemDoneEvent
    | ContentPartAddedEvent
    | ContentPartDoneEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningTextDeltaEvent
    | ReasoningTextDoneEvent
    | SummaryPartAddedEvent
    | SummaryPartDoneEvent
    | SummaryTextDeltaEvent
    | SummaryTextDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | CustomInputDeltaEvent
    | CustomInputDoneEvent
)
