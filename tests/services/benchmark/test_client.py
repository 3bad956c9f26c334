"""The client of `bench serve`: what servers answer, byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from services.measuring.client import ApiClient
from tests.conftest import in_loop

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
CLOSED = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
"""A response that ends with its connection, as that of Python's own server."""
EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n',
    b': keep-alive\n\ndata: {"choices": [{"delta": {"content": "a"}}]}\n\n',
    b'data: {"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5,'
    b' "prompt_tokens_details": {"cached_tokens": 3}}}\n\n',
    b"data: [DONE]\n\n",
)


def chunks(*parts: bytes, end: bool = True) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return CHUNKED + body + (b"0\r\n\r\n" if end else b"")


class ScriptedHttp:
    """Answers requests with whole responses, one after the other. An empty one closes."""

    def __init__(self, responses: Sequence[bytes]) -> None:
        self.heads: list[str] = []
        self.connections = 0
        self.closes = False
        """Whether it closes each connection after the first answer, without saying so."""
        self._responses = iter(responses)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                self.heads.append(head)
                length = int(head.partition("Content-Length: ")[2].split("\r\n")[0])
                await reader.readexactly(length)
                response = next(self._responses)
                for at in range(0, len(response), 29):  # events arrive in pieces
                    writer.write(response[at : at + 29])
                    await writer.drain()
                if self.closes or not response.endswith(b"0\r\n\r\n"):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(
    *responses: bytes, key: str = ""
) -> AsyncIterator[tuple[ScriptedHttp, ApiClient]]:
    script = ScriptedHttp(responses)
    async with await asyncio.start_server(script.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = ApiClient(f"http://127.0.0.1:{port}/v1/", key, timeout_s=60)
        yield script, client
        client.close()


@in_loop
async def test_an_answer_is_its_texts_with_times_and_its_usage() -> None:
    first = asyncio.Event()
    async with scripted(chunks(*EVENTS), key="k") as (script, client):
        answer = await client.stream("/chat/completions", {}, on_first=first.set)
    assert answer.error is None and first.is_set()
    assert answer.text == "a"
    assert len(answer.times) == 2 and 0 < answer.times[0] <= answer.times[1]
    assert answer.times[1] <= answer.total_s
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (7, 3, 5)
    assert script.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer k\r\n" in script.heads[0]


@in_loop
async def test_a_response_may_lack_usage_or_end_with_its_connection() -> None:
    async with scripted(chunks(*EVENTS[:4]), CLOSED + b"".join(EVENTS)) as (_, client):
        counted, closed = [await client.stream("/completions", {}) for _ in range(2)]
    assert (counted.error, counted.has_usage, counted.completion_tokens) == (None, False, 2)
    assert (closed.error, closed.completion_tokens) == (None, 5)


@in_loop
async def test_a_connection_is_used_again_and_replaced_when_it_is_gone() -> None:
    whole = chunks(*EVENTS)
    async with scripted(whole, whole, b"", whole) as (script, client):
        answers = [await client.stream("/completions", {}) for _ in range(3)]
    assert [each.error for each in answers] == [None] * 3
    assert (script.connections, len(script.heads)) == (2, 4)


@in_loop
async def test_a_connection_that_was_closed_while_nobody_used_it_is_replaced() -> None:
    """As some servers do after a while, or after each answer, without saying so."""
    whole = chunks(*EVENTS)
    async with scripted(whole, whole) as (script, client):
        script.closes = True
        answers = [await client.stream("/completions", {})]
        await asyncio.sleep(0.1)  # it is replaced too if this is too short
        answers.append(await client.stream("/completions", {}))
    assert [each.error for each in answers] == [None, None]
    assert (script.connections, len(script.heads)) == (2, 2)


@in_loop
async def test_errors_have_names() -> None:
    refused = b'{"error": {"message": "try later", "type": "rate_limit_error", "code": "full"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n"
    failing = b'data: {"error": {"message": "gone", "type": "server_error", "code": null}}\n\n'
    cases = [
        (head % len(refused) + refused, "HTTP 429 full", "try later"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\noops", "HTTP 502", "oops"),
        (chunks(EVENTS[1], failing), "error in the stream: server_error", "gone"),
        (chunks(*EVENTS[:3]), "stream ended early", ""),
        (chunks(*EVENTS[3:]), "no token", ""),
        (chunks(*EVENTS[:3], end=False), "ConnectionResetError", "the connection was lost"),
    ]
    async with scripted(*(response for response, _, _ in cases)) as (_, client):
        for _, name, detail in cases:
            answer = await client.stream("/completions", {})
            assert (answer.error, answer.detail) == (name, detail)
    async with scripted(b"SSH-2.0-OpenSSH\r\n") as (_, client):
        assert (await client.stream("/completions", {})).error == "ValueError"
    answer = await client.stream("/completions", {})
    assert answer.error == "ConnectionRefusedError"
