"""Answers to Responses requests: a response, or OpenAI's event stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from router.api.events import as_event
from router.errors import ApiError
from router.generation.choice import Choice, Piece
from router.generation.generation import Generation
from router.responses.objects import (
    Completed,
    Created,
    ErrorEvent,
    Event,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from router.responses.output import Output
from router.responses.schemas import Reasoning, ResponsesRequest, TextConfig, TextFormat
from router.schemas.objects import ChatToken
from router.tokens.logprobs import chat_logprobs


class ResponseWriter:
    """An `AnswerWriter`. ``keep`` gets each answer that came to its end, before it is sent."""

    keep_alive = b": keep-alive\n\n"

    def __init__(
        self, body: ResponsesRequest, model: str, keep: Callable[[str, bytes], None]
    ) -> None:
        self.id = "resp_" + uuid.uuid4().hex
        self._body = body
        self._model = model
        self._keep = keep
        self._created_at = int(time.time())
        self._sent = 0
        summarized = body.reasoning is not None and body.reasoning.summary is not None
        self._output = Output(summarized=summarized)

    def whole(self, generation: Generation, pieces: Sequence[Piece]) -> bytes:
        (choice,), (piece,) = generation.choices, pieces
        self._output.feed(piece, _logprobs(generation, piece))
        self._output.finish(_status(choice))
        answer = msgspec.json.encode(self._finished(generation))
        self._keep(self.id, answer)
        return answer

    def opening(self, generation: Generation) -> bytes:
        now = self._response("in_progress", [])
        return self._encode(Created(response=now), InProgress(response=now))

    def piece(self, generation: Generation, choice: Choice, piece: Piece) -> bytes:
        return self._encode(*self._output.feed(piece, _logprobs(generation, piece)))

    def end(self, generation: Generation, choice: Choice) -> bytes:
        return self._encode(*self._output.finish(_status(choice)))

    def closing(self, generation: Generation) -> bytes:
        response = self._finished(generation)
        self._keep(self.id, msgspec.json.encode(response))
        kind = Completed if response.status == "completed" else Incomplete
        return self._encode(kind(response=response))

    def error(self, error: ApiError) -> bytes:
        """Both of OpenAI's events: clients know one or the other."""
        # The item that was being said is not part of what is left.
        failed = msgspec.structs.replace(
            self._response("failed", self._output.items),
            error=ResponseError("server_error", error.message),
        )
        event = ErrorEvent(code=error.code, message=error.message, param=error.param)
        return self._encode(event, Failed(response=failed))

    def _finished(self, generation: Generation) -> ResponseObject:
        status = _status(generation.choices[0])
        return msgspec.structs.replace(
            self._response(status, self._output.items),
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            usage=_usage(generation),
        )

    def _response(self, status: ResponseStatus, output: list[OutputItem]) -> ResponseObject:
        body = self._body
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
            reasoning=body.reasoning or Reasoning(),
            safety_identifier=body.safety_identifier,
            store=body.store is not False,
            temperature=body.temperature,
            text=msgspec.structs.replace(text, format=text.format or TextFormat(type="text")),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            truncation=body.truncation or "disabled",
            usage=None,
            user=body.user,
            metadata=body.metadata or {},
        )

    def _encode(self, *events: Event) -> bytes:
        return b"".join(self._numbered(event) for event in events)

    def _numbered(self, event: Event) -> bytes:
        event.sequence_number = self._sent
        self._sent += 1
        return as_event(msgspec.json.encode(event), str(event.__struct_config__.tag))


def _status(choice: Choice) -> Literal["completed", "incomplete"]:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _logprobs(generation: Generation, piece: Piece) -> list[ChatToken]:
    if piece.tokens is None:
        return []
    return chat_logprobs(piece.tokens, generation.details).content


def _usage(generation: Generation) -> ResponseUsage:
    usage = generation.usage()
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.prompt_tokens_details.cached_tokens
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
