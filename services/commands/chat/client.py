"""The chat's client of OpenAI's API: lists models, and streams answers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.commands.admin_client import NoServer, ServerRefused
from services.commands.event_stream import StreamRefused, events, opened

_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 600.0
"""Timeout of each read while an answer is streamed: a queued prompt may take long."""
_VERSION = re.compile(r"/v\d+$")
Message = Mapping[str, Any]


@dataclass
class Reply:
    """An answer, as far as it has arrived. Times are in seconds."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None
    took_s: float = 0.0
    pieces: int = 0

    @property
    def tokens(self) -> int:
        found = self.usage.get("completion_tokens")
        return found if isinstance(found, int) else self.pieces

    def summary(self) -> str:
        """Return one line: length, speed, and how much of the prompt was cached."""
        parts = [f"{self.tokens} tokens"]
        if self.first_token_s is not None:
            decoding_s = self.took_s - self.first_token_s
            if self.tokens > 1 and decoding_s > 0:
                parts.append(f"{(self.tokens - 1) / decoding_s:.1f} tokens/s")
            parts.append(f"first token after {self.first_token_s:.2f} s")
        prompt = self.usage.get("prompt_tokens")
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if isinstance(prompt, int):
            parts.append(f"prompt {prompt}" + (f", {cached} cached" if cached else ""))
        if self.finish_reason == "length":
            parts.append("stopped at max_tokens")
        return ", ".join(parts)


class ChatClient:
    """Client of the server at ``url``, with or without a version such as ``/v1`` at the end."""

    def __init__(self, url: str, key: str, key_variable: str) -> None:
        url = url.rstrip("/")
        self.base = url if _VERSION.search(url) else f"{url}/v1"
        self._key, self._key_variable = key, key_variable

    def models(self) -> list[str]:
        """Return the names of the server's models. Raises `NoServer`, `ServerRefused`."""
        try:
            with opened(f"{self.base}/models", self._key, _TIMEOUT_S) as answer:
                return [str(each["id"]) for each in json.load(answer)["data"]]
        except StreamRefused as error:
            raise self._with_hint(error) from None
        except (ValueError, TypeError, KeyError):
            raise NoServer(
                f"{self.base}/models is not a list of models: is --url correct?"
            ) from None

    def answer(
        self, model: str, messages: Sequence[Message], parameters: Mapping[str, Any], reply: Reply
    ) -> Generator[tuple[str, str], None, None]:
        """Yield text and reasoning as they arrive, one of them empty, and record them in ``reply``.

        Closing this generator stops the server's generation. Raises `NoServer`, `ServerRefused`."""
        body = {
            "model": model,
            "messages": list(messages),
            **parameters,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        try:
            with opened(
                f"{self.base}/chat/completions", self._key, _ANSWER_TIMEOUT_S, body
            ) as lines:
                for event in events(lines):
                    if event.data == "[DONE]":
                        return
                    text, reasoning = _take(event.data, reply)
                    reply.took_s = time.monotonic() - began
                    if text or reasoning:
                        reply.pieces += 1
                        if reply.first_token_s is None:
                            reply.first_token_s = reply.took_s
                        yield text, reasoning
            if not reply.finish_reason:
                raise NoServer("the answer is incomplete: the server closed the connection")
        except StreamRefused as error:
            raise self._with_hint(error) from None

    def _with_hint(self, error: StreamRefused) -> ServerRefused:
        if error.status == 401:
            return ServerRefused(f"{error} (set the API key in ${self._key_variable})")
        return error


def _take(data: str, reply: Reply) -> tuple[str, str]:
    """Record one chunk of a stream in ``reply``; return its text and its reasoning."""
    try:
        chunk = json.loads(data)
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise ServerRefused(" ".join(str(message).split()))
        reply.usage = chunk.get("usage") or reply.usage
        text = reasoning = ""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    except (ValueError, TypeError, AttributeError):
        raise NoServer(f"not a chunk of OpenAI's API: {data[:100]!r}") from None
    reply.text += text
    reply.reasoning += reasoning
    return text, reasoning
