"""Answers to Responses requests: a JSON response or OpenAI's event stream."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal, cast

import msgspec
from msgspec import Raw

from router.api.output import encode_events
from router.api.sse import MEDIA_TYPE
from router.errors import ApiError
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation
from router.responses.compaction import CompactionBuilder
from router.responses.objects import (
    CompactedResponse,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseError,
    ResponseErrorEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
    SequencedEvent,
)
from router.responses.output import OutputItemBuilder
from router.responses.schemas import (
    InputItem,
    ReasoningConfig,
    ResponsesRequest,
    ResponsesTool,
    TextConfig,
    TextFormat,
)
from router.responses.tools import ClientTool
from router.schemas.completions import ChatCompletionTokenLogprob
from router.tokens.logprobs import chat_logprobs


class ResponseWriter:
    """An `OutputWriter` of one Responses request."""

    stream_type = MEDIA_TYPE
    repeats_request = True

    def __init__(
        self,
        body: ResponsesRequest,
        model: str,
        tools: Sequence[ClientTool],
        store: Callable[[str, bytes], None],
        seal: Callable[[str], str],
        compaction: CompactionBuilder | None = None,
    ) -> None:
        self.id = "resp_" + uuid.uuid4().hex
        self._body = body
        self._model = model
        self._store = store
        """Called with the id and JSON of the finished response before it is sent."""
        self._created_at = int(time.time())
        self._sequence_numbers = itertools.count()
        summarized = body.reasoning is not None and body.reasoning.summary is not None
        self._output: OutputItemBuilder | CompactionBuilder = compaction or OutputItemBuilder(
            summarized=summarized,
            tools=tools,
            seal=seal if body.wants_sealed_reasoning else None,
        )

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> list[bytes]:
        (choice,), (delta,) = generation.choices, deltas
        self._output.feed(delta, _logprobs(generation, delta))
        self._output.finish(_status(choice))
        response = msgspec.json.encode(self._finished(generation))
        self._store(self.id, response)
        return [response]

    @property
    def keep_alive(self) -> bytes:
        """An event, since clients that wait for the next one do not count comments. Its response
        repeats nothing, as the request may be large."""
        bare = self._response("in_progress", [], ResponsesRequest(input=""))
        return self._encode(ResponseInProgressEvent(response=bare))

    def opening(self) -> bytes:
        response = self._response("in_progress", [])
        created = ResponseCreatedEvent(response=response)
        return self._encode(created, ResponseInProgressEvent(response=response))

    def add(self, item: OutputItem) -> None:
        """Put ``item`` before the answer, which has not begun."""
        self._output.finished.append(item)

    def stream_start(self, generation: Generation) -> bytes:
        return self._encode(*self._output.begin())

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        return self._encode(*self._output.feed(delta, _logprobs(generation, delta)))

    def choice_end(self, generation: Generation, choice: Choice) -> bytes:
        return self._encode(*self._output.finish(_status(choice)))

    def stream_end(self, generation: Generation) -> bytes:
        response = self._finished(generation)
        encoded = msgspec.json.encode(response)
        self._store(self.id, encoded)
        completed = response.status == "completed"
        event_type = ResponseCompletedEvent if completed else ResponseIncompleteEvent
        return self._encode(event_type(response=cast(ResponseObject, Raw(encoded))))

    def error(self, error: ApiError) -> bytes:
        """Return both of OpenAI's events, because a client may know only one of them."""
        failed = msgspec.structs.replace(
            self._response("failed", self._output.finished),  # without the item that was cut off
            error=ResponseError("server_error", error.message),
        )
        event = ResponseErrorEvent(code=error.code, message=error.message, param=error.param)
        return self._encode(event, ResponseFailedEvent(response=failed))

    def _finished(self, generation: Generation) -> ResponseObject:
        status = _status(generation.choices[0])
        return msgspec.structs.replace(
            self._response(status, self._output.finished),
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            usage=_usage(generation),
        )

    def _response(
        self,
        status: ResponseStatus,
        output: list[OutputItem],
        body: ResponsesRequest | None = None,
    ) -> ResponseObject:
        body = body or self._body
        text = body.text or TextConfig()
        return ResponseObject(
            id=self.id,
            created_at=self._created_at,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            model=self._model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning or ReasoningConfig(),
            safety_identifier=body.safety_identifier,
            store=body.store is not False,
            temperature=body.temperature,
            text=msgspec.structs.replace(text, format=text.format or TextFormat(type="text")),
            tool_choice=body.tool_choice or "auto",
            tools=[_echoed(tool) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            truncation=body.truncation or "disabled",
            usage=None,
            user=body.user,
            metadata=body.metadata or {},
        )

    def _encode(self, *events: SequencedEvent) -> bytes:
        for event in events:
            event.sequence_number = next(self._sequence_numbers)
        return encode_events(*events)


class CompactedWriter(ResponseWriter):
    """Answers with the compacted conversation, which is never streamed."""

    kept: Sequence[InputItem] = ()
    """The messages that stay."""

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> list[bytes]:
        self._output.feed(deltas[0])
        self._output.finish()
        output = msgspec.to_builtins([*self.kept, *self._output.finished])
        return [
            msgspec.json.encode(
                CompactedResponse(
                    id=self.id,
                    created_at=self._created_at,
                    output=output,
                    usage=_usage(generation),
                )
            )
        ]


def _echoed(tool: ResponsesTool) -> ResponsesTool:
    """Return ``tool`` with the fields of a function in OpenAI's answers."""
    if tool.type != "function":
        return tool
    parameters, strict = tool.parameters or None, tool.strict or None
    return msgspec.structs.replace(tool, parameters=parameters, strict=strict)


def _status(choice: Choice) -> Literal["completed", "incomplete"]:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _logprobs(generation: Generation, delta: OutputDelta) -> list[ChatCompletionTokenLogprob]:
    if delta.tokens is None:
        return []
    return chat_logprobs(delta.tokens, generation.logprobs_context).content


def _usage(generation: Generation) -> ResponseUsage:
    usage = generation.usage()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
