"""Answers to chats and prompts: one object, or one line of JSON per part."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.api.output import json_object
from router.api.sse import on_one_line
from router.errors import ApiError
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation
from router.ollama.errors import error_body
from router.ollama.objects import (
    OllamaAnswer,
    OllamaCall,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaReply,
)
from router.schemas.completions import ChatCompletionTokenLogprob
from router.tokens.logprobs import chat_logprobs
from router.tokens.reply_parser import CallDelta

MEDIA_TYPE = "application/x-ndjson"


class OllamaWriter(ABC):
    """An `OutputWriter` of one request. A tool call is sent once it is complete."""

    stream_type = MEDIA_TYPE.encode()
    repeats_request = False

    def __init__(self, model: str) -> None:
        self.id = "ollama-" + uuid.uuid4().hex
        self._model = model
        self._calls: dict[int, CallDelta] = {}
        self.keep_alive = _line(self._answer(OutputDelta(), **self._header(done=False)))

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> list[bytes]:
        (delta,) = deltas
        self._add_calls(delta)
        fields = self._last(generation) | {"logprobs": _logprobs(generation, delta)}
        return [msgspec.json.encode(self._answer(delta, self._whole_calls(), **fields))]

    def opening(self) -> bytes:
        return b""

    def stream_start(self, generation: Generation) -> bytes:
        return b""

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        return b"".join(self._piece(generation, each) for each in delta.split())

    def _piece(self, generation: Generation, delta: OutputDelta) -> bytes:
        self._add_calls(delta)
        shown = delta.text or delta.reasoning  # which ends the calls before
        lines = self._call_lines(before=None if shown else max(self._calls, default=0))
        logprobs = _logprobs(generation, delta)
        if shown or logprobs:
            fields = self._header(done=False) | {"logprobs": logprobs}
            lines += _line(self._answer(delta, **fields))
        return lines

    def _call_lines(self, before: int | None = None) -> bytes:
        calls = self._whole_calls(before)
        lines = (self._answer(OutputDelta(), [call], **self._header(done=False)) for call in calls)
        return b"".join(map(_line, lines))

    def choice_end(self, generation: Generation, choice: Choice) -> bytes:
        return self._call_lines()

    def stream_end(self, generation: Generation) -> bytes:
        return _line(self._answer(OutputDelta(), **self._last(generation)))

    def error(self, error: ApiError) -> bytes:
        return on_one_line(error_body(error)) + b"\n"

    @abstractmethod
    def _answer(
        self, delta: OutputDelta, calls: Sequence[OllamaCall] = (), **fields: Any
    ) -> OllamaAnswer:
        """Return a complete or partial answer with this output."""

    def _header(self, *, done: bool) -> dict[str, Any]:
        return {"model": self._model, "created_at": timestamp(), "done": done}

    def _last(self, generation: Generation) -> dict[str, Any]:
        (choice,) = generation.choices
        reason = "length" if choice.finish_reason == "length" else "stop"
        return {**self._header(done=True), "done_reason": reason, **_figures(generation, choice)}

    def _add_calls(self, delta: OutputDelta) -> None:
        for call in delta.calls:
            begun = self._calls.get(call.number)
            whole = (
                call
                if begun is None
                else begun._replace(arguments=begun.arguments + call.arguments)
            )
            self._calls[call.number] = whole

    def _whole_calls(self, before: int | None = None) -> list[OllamaCall]:
        """Return the tool calls not sent yet: all, or those with a number below ``before``."""
        numbers = [number for number in self._calls if before is None or number < before]
        return [_call(self._calls.pop(number)) for number in numbers]


class OllamaChatWriter(OllamaWriter):
    def _answer(
        self, delta: OutputDelta, calls: Sequence[OllamaCall] = (), **fields: Any
    ) -> OllamaChatAnswer:
        reply = OllamaReply(
            content=delta.text,
            thinking=delta.reasoning or UNSET,
            tool_calls=list(calls) or UNSET,
        )
        return OllamaChatAnswer(message=reply, **fields)


class OllamaGenerateWriter(OllamaWriter):
    repeats_request = True  # as token ids

    def __init__(self, model: str, *, raw: bool) -> None:
        self._raw = raw
        super().__init__(model)

    def _answer(
        self, delta: OutputDelta, calls: Sequence[OllamaCall] = (), **fields: Any
    ) -> OllamaGenerateAnswer:
        return OllamaGenerateAnswer(
            response=delta.text, thinking=delta.reasoning or UNSET, **fields
        )

    def _last(self, generation: Generation) -> dict[str, Any]:
        found = super()._last(generation)
        if not self._raw:
            (choice,) = generation.choices
            found["context"] = [*choice.sequence.submit.token_ids, *choice.output_token_ids]
        return found


def timestamp(seconds: float | None = None) -> str:
    """Return a time of ``time.time`` as text, by default the current time."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _figures(generation: Generation, choice: Choice) -> dict[str, int]:
    sequence, usage, now = choice.sequence, generation.usage(), time.monotonic()
    first = sequence.first_token_at or now
    last = max(first, sequence.last_token_at)
    return {
        "total_duration": _ns(now - generation.started_at + generation.load_s),
        "load_duration": _ns(generation.load_s),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(first - (sequence.placed_at or first)),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(last - first),
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _logprobs(
    generation: Generation, delta: OutputDelta
) -> list[ChatCompletionTokenLogprob] | UnsetType:
    if delta.tokens is None:
        return UNSET
    return chat_logprobs(delta.tokens, generation.logprobs_context).content or UNSET


def _call(call: CallDelta) -> OllamaCall:
    function = OllamaCalledFunction(call.number, call.name or "", json_object(call.arguments))
    return OllamaCall(call.id or "", function)


def _line(answer: OllamaAnswer) -> bytes:
    return on_one_line(msgspec.json.encode(answer)) + b"\n"
