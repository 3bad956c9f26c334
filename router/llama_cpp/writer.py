"""Answers of `/infill`: one object, or a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from router.api.sse import MEDIA_TYPE, encode_event
from router.errors import ApiError
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation
from router.llama_cpp.schemas import InfillAnswer, InfillRequest, InfillSettings, InfillTimings


class InfillWriter:
    """An `OutputWriter` of one request."""

    stream_type = MEDIA_TYPE
    keep_alive = b": keep-alive\n\n"
    repeats_request = False

    def __init__(self, body: InfillRequest, model: str) -> None:
        self.id = "infill-" + uuid.uuid4().hex
        self._body = body
        self._model = model
        self._has_new_line = False

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> list[bytes]:
        (choice,), (delta,) = generation.choices, deltas
        return [msgspec.json.encode(self._last(generation, choice, delta.text))]

    def opening(self) -> bytes:
        return b""

    def stream_start(self, generation: Generation) -> bytes:
        return b""

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes:
        return b"".join(self._piece(choice, each) for each in delta.split())

    def _piece(self, choice: Choice, delta: OutputDelta) -> bytes:
        self._has_new_line |= "\n" in delta.text
        answer = InfillAnswer(
            **self._counts(choice, delta.text, is_last=False),
            prompt_progress=delta.progress or msgspec.UNSET,
        )
        return encode_event(msgspec.json.encode(answer))

    def choice_end(self, generation: Generation, choice: Choice) -> bytes:
        return b""

    def stream_end(self, generation: Generation) -> bytes:
        (choice,) = generation.choices
        return encode_event(msgspec.json.encode(self._last(generation, choice, "")))

    def error(self, error: ApiError) -> bytes:
        return encode_event(error.body())

    def _counts(self, choice: Choice, text: str, *, is_last: bool) -> dict[str, Any]:
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": -1,
            "stop": is_last,
            "tokens_predicted": self._num_predicted(choice),
            "tokens_evaluated": choice.sequence.num_prompt_tokens,
        }

    def _num_predicted(self, choice: Choice) -> int:
        # An engine always generates a token, which is not shown then.
        return 0 if self._body.max_tokens == 0 else choice.completion_tokens

    def _last(
        self, generation: Generation, choice: Choice, text: str
    ) -> InfillAnswer | dict[str, Any]:
        """Return the complete answer with ``text``, or the fields of it that are wanted."""
        body, submit = self._body, choice.sequence.submit
        sampling = submit.sampling
        answer = InfillAnswer(
            **self._counts(choice, text, is_last=True),
            model=self._model,
            generation_settings=InfillSettings(
                n_predict=0 if body.max_tokens == 0 else submit.max_tokens,
                seed=generation.seed,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                stop=list(body.stop_strings),
            ),
            has_new_line=self._has_new_line or "\n" in text,
            truncated=choice.prompt.is_cut,
            stop_type=_stop_type(choice),
            stopping_word=choice.stop_string or "",
            tokens_cached=choice.sequence.cached_tokens,
            timings=_timings(choice, self._num_predicted(choice)),
        )
        if not body.response_fields:
            return answer
        return _chosen(msgspec.to_builtins(answer), body.response_fields)


def _stop_type(choice: Choice) -> Literal["eos", "limit", "word"]:
    if choice.stop_string is not None:
        return "word"
    return "limit" if choice.finish_reason == "length" or choice.is_complete else "eos"


def _timings(choice: Choice, num_predicted: int) -> InfillTimings:
    sequence, now = choice.sequence, time.monotonic()
    first = sequence.first_token_at or now
    prompt_ms = max(0.0, first - (sequence.placed_at or first)) * 1000
    predicted_ms = max(0.0, sequence.last_token_at - first) * 1000 if num_predicted else 0.0
    num_computed = sequence.num_prompt_tokens - sequence.cached_tokens
    return InfillTimings(
        cache_n=sequence.cached_tokens,
        prompt_n=num_computed,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, num_computed),
        prompt_per_second=_ratio(num_computed * 1000, prompt_ms),
        predicted_n=num_predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, num_predicted),
        predicted_per_second=_ratio(num_predicted * 1000, predicted_ms),
    )


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


def _chosen(answer: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the ``fields`` of ``answer`` that it has. One within another is named, and returned,
    by its path."""
    found = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found
