"""Replies built from the events of a stream of the server's API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from services.localai.messages import ChatDelta, Reply, ToolCallDelta


class ReplyMaker:
    """The replies of one call. Times are in milliseconds, as in llama.cpp's backend."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._first: float | None = None
        self._ended = self._begun
        self._logprobs: list[Mapping[str, Any]] = []
        self.prompt_tokens = self.tokens = 0

    def of_event(self, event: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the reply for one event, if it has anything to report immediately."""
        if usage := event.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.tokens = usage["completion_tokens"]
        for choice in event["choices"]:
            if logprobs := choice.get("logprobs"):
                self._logprobs += _token_logprobs(logprobs)
            delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
            made = _chat_delta(delta)
            if made.ByteSize():
                if self._first is None:
                    self._first = time.perf_counter()
                yield Reply(message=made.content.encode(), chat_deltas=[made])

    def last(self) -> Any:
        """Return the reply that ends a stream: counts, timings, and all log-probabilities."""
        now = self._ended = time.perf_counter()
        first = self._first or now
        logprobs = {"content": self._logprobs}
        return Reply(
            tokens=self.tokens,
            prompt_tokens=self.prompt_tokens,
            timing_prompt_processing=(first - self._begun) * 1000,
            timing_token_generation=(now - first) * 1000,
            logprobs=msgspec.json.encode(logprobs) if self._logprobs else b"",
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second from the first token of the answer to its end."""
        seconds = self._ended - (self._first or self._ended)
        return self.tokens / seconds if seconds else 0.0


class WholeReply:
    """The replies of a stream combined into one, for a caller that waits for the
    complete answer."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, Any] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, reply: Any) -> None:
        for delta in reply.chat_deltas:
            self._content.append(delta.content)
            self._reasoning.append(delta.reasoning_content)
            for call in delta.tool_calls:
                self._arguments.setdefault(call.index, []).append(call.arguments)
                self._calls.setdefault(call.index, call)

    def of(self, last: Any) -> Any:
        """Return ``last`` with everything that was added."""
        delta = ChatDelta(
            content="".join(self._content), reasoning_content="".join(self._reasoning)
        )
        for index in sorted(self._calls):
            first = self._calls[index]
            delta.tool_calls.add(
                index=index,
                id=first.id,
                name=first.name,
                arguments="".join(self._arguments[index]),
            )
        last.message = delta.content.encode()
        last.chat_deltas.append(delta)
        return last


def _chat_delta(delta: Mapping[str, Any]) -> Any:
    return ChatDelta(
        content=delta.get("content") or "",
        reasoning_content=delta.get("reasoning_content") or "",
        tool_calls=[
            ToolCallDelta(
                index=call["index"],
                id=call.get("id") or "",
                name=call["function"].get("name") or "",
                arguments=call["function"].get("arguments") or "",
            )
            for call in delta.get("tool_calls") or ()
        ],
    )


def _token_logprobs(logprobs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the log-probabilities of either endpoint in the format of chat completions."""
    if "content" in logprobs:
        return logprobs["content"] or []
    columns = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    return [
        {
            "token": token,
            "logprob": logprob,
            "bytes": list(token.encode()),
            "top_logprobs": [
                {"token": other, "logprob": value, "bytes": list(other.encode())}
                for other, value in (top or {}).items()
            ],
        }
        for token, logprob, top in columns
    ]
