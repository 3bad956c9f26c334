"""A streaming client that costs little, so that the servers have the machine."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 600.0


@dataclass
class StreamedAnswer:
    """One streamed answer. Times are seconds since the request was sent."""

    text: str = ""
    times: list[float] = field(default_factory=list)  # one for each event that brought text
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


async def complete(port: int, prompt: Any, max_tokens: int, **fields: Any) -> StreamedAnswer:
    """Stream one greedy completion. A failure is in ``error``."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    data = json.dumps(body).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
    )
    loop = asyncio.get_running_loop()
    stream = StreamedAnswer()
    began = time.perf_counter()
    try:
        transport, answer = await loop.create_connection(
            lambda: _Answer(request, loop.create_future()), "127.0.0.1", port
        )
        try:
            await asyncio.wait_for(answer.complete, TIMEOUT_S)
        finally:
            transport.close()
        stream.total_s = time.perf_counter() - began
        answer.read(stream, began)
    except (OSError, ValueError, TimeoutError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream


class _Answer(asyncio.Protocol):
    """Keeps the pieces of a response with their times, to be parsed when it is complete."""

    def __init__(self, request: bytes, complete: asyncio.Future[None]) -> None:
        self._request = request
        self._pieces: list[tuple[float, bytes]] = []
        self.complete = complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.complete.done():
            return
        if exc is None:
            self.complete.set_result(None)
        else:
            self.complete.set_exception(exc)

    def read(self, stream: StreamedAnswer, began: float) -> None:
        """Parse the response into ``stream``. Raises ValueError for any status but 200."""
        whole = b"".join(data for _, data in self._pieces)
        if whole.split(maxsplit=2)[1:2] != [b"200"]:
            raise ValueError(repr(whole[:2000]))
        rest = b""
        for at, data in self._pieces:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    _take(json.loads(line[6:]), stream, at - began)


def _take(event: dict[str, Any], stream: StreamedAnswer, at_s: float) -> None:
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


async def complete_all(
    port: int, prompts: list[Any], max_tokens: int, **fields: Any
) -> list[StreamedAnswer]:
    """Stream completions of all ``prompts`` at once."""
    return await asyncio.gather(*(complete(port, p, max_tokens, **fields) for p in prompts))
