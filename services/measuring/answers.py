"""One streamed answer as seen by the client: timed events, usage, error."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_DETAIL_CHARACTERS = 300


@dataclass
class StreamedAnswer:
    """Times are seconds since ``began``, when the request was sent."""

    began: float = 0.0  # of time.perf_counter()
    text: str = ""
    times: list[float] = field(default_factory=list)  # one for each event with text
    logprobs: list[float] = field(default_factory=list)  # of the tokens, if a chat requested them
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    has_usage: bool = False
    """None: each event counts as a token, and nothing is known about the prompt."""
    finish_reason: str | None = None
    error: str | None = None
    """Its name for counting errors."""
    detail: str = ""
    """The server's message about the error."""

    @property
    def first_s(self) -> float:
        return self.times[0] if self.times else float("nan")

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


class EventReader:
    """Reads the body of a response into ``answer`` as it arrives."""

    def __init__(self, answer: StreamedAnswer) -> None:
        self._answer = answer
        self._rest = b""
        self._refusal = b""
        self._done = False

    def take(self, status: int, at: float, data: bytes) -> None:
        """Add a part of the body of a response with ``status`` that arrived ``at`` a time."""
        if status != 200:
            self._refusal += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                self._done = True
            elif content.startswith(b"{"):
                self._take_event(json.loads(content), at - self._answer.began)

    def end(self, status: int) -> None:
        """The response is complete. Set the error, if there is one."""
        answer = self._answer
        if status != 200:
            answer.error, answer.detail = _refusal(status, self._refusal)
        elif answer.error is None and not (self._done or answer.finish_reason):
            answer.error = "stream ended early"
        elif answer.error is None and not answer.times:
            answer.error = "no token"

    def _take_event(self, event: dict[str, Any], at_s: float) -> None:
        answer = self._answer
        if "error" in event:
            name, answer.detail = _error_of(event["error"])
            answer.error = f"error in the stream: {name}"
        if usage := event.get("usage"):
            answer.has_usage = True
            answer.prompt_tokens = usage.get("prompt_tokens") or 0
            answer.completion_tokens = usage.get("completion_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens") or 0
        for choice in event.get("choices") or ():
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            scores = (choice.get("logprobs") or {}).get("content") or ()
            answer.logprobs += [score["logprob"] for score in scores]
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if text or thought or delta.get("tool_calls"):
                answer.text += text
                answer.times.append(at_s)
                if not answer.has_usage:
                    answer.completion_tokens += 1


def _refusal(status: int, body: bytes) -> tuple[str, str]:
    try:
        name, detail = _error_of(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {status}", body[:_DETAIL_CHARACTERS].decode(errors="replace")
    return f"HTTP {status} {name}", detail


def _error_of(error: Any) -> tuple[str, str]:
    """Return the code (or type) and message of an error object of OpenAI's API."""
    if not isinstance(error, dict):
        return "error", str(error)[:_DETAIL_CHARACTERS]
    name = error.get("code") or error.get("type") or "error"
    return str(name), str(error.get("message"))[:_DETAIL_CHARACTERS]
