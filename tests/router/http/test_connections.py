"""Limits of a connection: the time and the size of headers, and input that is not HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import uvicorn
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from router.http.connections import Connection

TIMEOUT_S = 1.0
MAX_BYTES = 4096
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class StrictConnection(Connection):
    headers_timeout_s = TIMEOUT_S
    max_header_bytes = MAX_BYTES


async def answer_slowly(scope: Scope, receive: Receive, send: Send) -> None:
    """Stream eight parts; on `/slow` this takes twice as long as headers may."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b"part\n"
            await asyncio.sleep(TIMEOUT_S / 4 if scope["path"] == "/slow" else 0)

    while scope["method"] == "POST" and (await receive()).get("more_body"):
        pass
    await StreamingResponse(parts())(scope, receive, send)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(answer_slowly, http=StrictConnection, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(10)
    listener.close()


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=20 * TIMEOUT_S) as connection:
        yield connection


def read_to_end(client: socket.socket) -> bytes:
    """Return what arrives until the server closes."""
    found = b""
    while received := client.recv(65536):
        found += received
    return found


def error_code(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nx-request-id: " in head
    code: str = json.loads(body)["error"]["code"]
    return code


def test_an_idle_connection_is_closed(client: socket.socket) -> None:
    assert read_to_end(client) == b""


def test_headers_that_do_not_end_are_a_408(client: socket.socket) -> None:
    began = time.monotonic()
    client.sendall(REQUEST[:-2])
    for _ in range(2):
        time.sleep(TIMEOUT_S / 4)
        client.sendall(b"a: b\r\n")
    assert error_code(read_to_end(client), 408) == "request_timeout"
    assert time.monotonic() - began < 10 * TIMEOUT_S


def test_blank_lines_do_not_keep_a_connection_open(client: socket.socket) -> None:
    client.sendall(REQUEST)
    while not (found := client.recv(65536)).endswith(b"0\r\n\r\n"):
        assert found
    client.sendall(b"\r\n")
    assert read_to_end(client) == b""


def test_headers_that_are_too_long_are_a_431(client: socket.socket) -> None:
    client.sendall(REQUEST[:-2] + b"a: " + b"b" * MAX_BYTES)
    assert error_code(read_to_end(client), 431) == "headers_too_large"


def test_input_that_is_not_http_is_a_400(client: socket.socket) -> None:
    client.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
    assert error_code(read_to_end(client), 400) == "invalid_http"


def test_a_malformed_chunked_body_is_a_400(client: socket.socket) -> None:
    client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n")
    assert error_code(read_to_end(client), 400) == "invalid_http"


def test_an_answer_may_take_longer_than_headers(client: socket.socket) -> None:
    client.sendall(REQUEST.replace(b" / ", b" /slow "))
    client.sendall(
        REQUEST[:-4]
    )  # the next request begins; its time counts from the end of this answer
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        found += client.recv(65536)
    assert found.count(b"part\n") == 8
    assert error_code(read_to_end(client), 408) == "request_timeout"


def test_a_connection_serves_several_requests(client: socket.socket) -> None:
    for _ in range(3):
        client.sendall(REQUEST)
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            found += client.recv(65536)
        assert found.startswith(b"HTTP/1.1 200")
