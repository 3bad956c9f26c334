"""Streams from the compared servers: `services.measuring.client` on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from services.measuring.answers import StreamedAnswer
from services.measuring.client import ApiClient

Message = dict[str, str]
"""The role and the content of a message."""


async def complete(port: int, prompt: Any, max_tokens: int, **fields: Any) -> StreamedAnswer:
    """Stream one greedy completion. A failure is recorded in ``error``."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, **fields}
    with closing(ApiClient(f"http://127.0.0.1:{port}")) as client:
        return await client.stream("/completions", body)


async def chat(
    port: int, messages: list[Message], max_tokens: int, into: StreamedAnswer | None = None
) -> StreamedAnswer:
    """Stream one greedy answer with the log-probabilities of its tokens, ``into`` an answer that
    can be read meanwhile. A failure is recorded in ``error``."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0.0, "logprobs": True}
    with closing(ApiClient(f"http://127.0.0.1:{port}")) as client:
        return await client.stream("/chat/completions", body, into)


async def complete_all(
    port: int, prompts: list[Any], max_tokens: int, **fields: Any
) -> list[StreamedAnswer]:
    """Stream completions of all ``prompts`` at once."""
    return await asyncio.gather(*(complete(port, p, max_tokens, **fields) for p in prompts))


def checked(answers: Sequence[StreamedAnswer]) -> Sequence[StreamedAnswer]:
    """Return ``answers``. Exits if one of them failed."""
    for answer in answers:
        if answer.error:
            sys.exit(f"a request failed: {answer.error} {answer.detail}")
    return answers


def token_rate(answers: Sequence[StreamedAnswer]) -> float:
    """Return the tokens per second of ``answers`` that began at the same time."""
    tokens = sum(answer.completion_tokens for answer in checked(answers))
    return tokens / max(answer.total_s for answer in answers)
