"""A streaming client that costs little, so that both servers have the machine."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 600.0


@dataclass
class Stream:
    """One streamed answer. Times are seconds since the request was sent; ``times`` has
    one for each event that brought text."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    total_s: float = 0.0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def first_s(self) -> float:
        return self.times[0] if self.times else float("nan")

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def complete(port: int, prompt: Any, max_tokens: int, **fields: Any) -> Stream:
    """Streams one greedy completion; what goes wrong is in ``error``."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    stream = Stream()
    started = time.perf_counter()
    try:
        await asyncio.wait_for(_run(port, body, stream, started), TIMEOUT_S)
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    stream.total_s = time.perf_counter() - started
    return stream


async def _run(port: int, body: dict[str, Any], stream: Stream, started: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        status = (await reader.readline()).split()
        if status[1:2] != [b"200"]:
            raise ValueError(f"status {status} {(await reader.read(2000))!r}")
        async for line in reader:
            if line.startswith(b"data: {"):
                _take(json.loads(line[6:]), stream, time.perf_counter() - started)
    finally:
        writer.close()


def _take(event: dict[str, Any], stream: Stream, at_s: float) -> None:
    if "error" in event:
        stream.error = json.dumps(event["error"])
    usage = event.get("usage")
    if usage:
        stream.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        stream.cached_tokens = details.get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
        if choice.get("text"):
            stream.text += choice["text"]
            stream.times.append(at_s)


async def together(port: int, prompts: list[Any], max_tokens: int, **fields: Any) -> list[Stream]:
    """All ``prompts`` at once."""
    return await asyncio.gather(*(complete(port, p, max_tokens, **fields) for p in prompts))
