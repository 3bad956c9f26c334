"""Responses, their items and the events of their streams, as OpenAI has them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from router.responses.schemas import FunctionTool, Reasoning, TextConfig, ToolSelection
from router.schemas.objects import ChatToken

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, frozen=True, kw_only=True, tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatToken]


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(Struct, frozen=True, tag="summary_text"):
    text: str


class MessageItem(Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning"):
    """Reasoning is in ``content``, or in ``summary`` where one was asked for: it is its own."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: None = None
    status: ItemStatus


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag="function_call"):
    """``id`` is the item's; results go to ``call_id``."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, frozen=True, kw_only=True):
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
    """A response as it is now, with what was asked for."""

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
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: TextConfig
    tool_choice: str | ToolSelection
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class ItemList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# -- events --------------------------------------------------------------------


class Event(Struct, kw_only=True):
    """``sequence_number`` is set when it is sent."""

    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    response: ResponseObject


class Created(ResponseEvent, tag="response.created"): ...


class InProgress(ResponseEvent, tag="response.in_progress"): ...


class Completed(ResponseEvent, tag="response.completed"): ...


class Incomplete(ResponseEvent, tag="response.incomplete"): ...


class Failed(ResponseEvent, tag="response.failed"): ...


class ErrorEvent(Event, kw_only=True, tag="error"):
    code: str | None
    message: str
    param: str | None


class ItemEvent(Event, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(ItemEvent, tag="response.output_item.added"): ...


class ItemDone(ItemEvent, tag="response.output_item.done"): ...


class ContentEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: Literal[0] = 0


class PartAdded(ContentEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(ContentEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(ContentEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatToken]


class TextDone(ContentEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatToken]


class ReasoningDelta(ContentEvent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(ContentEvent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class SummaryEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    summary_index: Literal[0] = 0


class SummaryPartAdded(SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.added"):
    part: SummaryText


class SummaryPartDone(SummaryEvent, kw_only=True, tag="response.reasoning_summary_part.done"):
    part: SummaryText


class SummaryDelta(SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.delta"):
    delta: str


class SummaryDone(SummaryEvent, kw_only=True, tag="response.reasoning_summary_text.done"):
    text: str


class ArgumentsEvent(Event, kw_only=True):
    item_id: str
    output_index: int


class ArgumentsDelta(ArgumentsEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ArgumentsEvent, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


StreamEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ErrorEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
)
