"""Connections that ask for nothing, or too much of the server's patience."""

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

PATIENCE_S = 1.0
MANY_BYTES = 4096
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Impatient(Connection):
    headers_timeout_s = PATIENCE_S
    max_header_bytes = MANY_BYTES


async def answer_slowly(scope: Scope, receive: Receive, send: Send) -> None:
    """Where it is asked for, over twice the time that headers have."""

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b"part\n"
            await asyncio.sleep(PATIENCE_S / 4 if scope["path"] == "/slow" else 0)

    while scope["method"] == "POST" and (await receive()).get("more_body"):
        pass
    await StreamingResponse(parts())(scope, receive, send)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(answer_slowly, http=Impatient, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(10)
    listener.close()


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=20 * PATIENCE_S) as connection:
        yield connection


def rest(client: socket.socket) -> bytes:
    """What comes until the server closes."""
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


def test_a_connection_that_says_nothing_is_closed(client: socket.socket) -> None:
    assert rest(client) == b""


def test_headers_that_do_not_end_are_not_waited_for(client: socket.socket) -> None:
    began = time.monotonic()
    client.sendall(ASK[:-2])
    for _ in range(2):
        time.sleep(PATIENCE_S / 4)
        client.sendall(b"a: b\r\n")
    assert error_code(rest(client), 408) == "request_timeout"
    assert time.monotonic() - began < 10 * PATIENCE_S


def test_blank_lines_do_not_keep_a_connection_open(client: socket.socket) -> None:
    client.sendall(ASK)
    while not (found := client.recv(65536)).endswith(b"0\r\n\r\n"):
        assert found
    client.sendall(b"\r\n")
    assert rest(client) == b""


def test_headers_that_are_too_long_are_told_so(client: socket.socket) -> None:
    client.sendall(ASK[:-2] + b"a: " + b"b" * MANY_BYTES)
    assert error_code(rest(client), 431) == "headers_too_large"


def test_what_is_not_http_is_told_so(client: socket.socket) -> None:
    client.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
    assert error_code(rest(client), 400) == "invalid_http"


def test_a_body_that_breaks_off_its_form_is_told_so(client: socket.socket) -> None:
    client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n")
    assert error_code(rest(client), 400) == "invalid_http"


def test_an_answer_may_take_longer_than_headers(client: socket.socket) -> None:
    client.sendall(ASK.replace(b" / ", b" /slow "))
    client.sendall(ASK[:-4])  # the next one begins, and has its time once this one is done
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        found += client.recv(65536)
    assert found.count(b"part\n") == 8
    assert error_code(rest(client), 408) == "request_timeout"


def test_a_connection_serves_one_request_after_the_other(client: socket.socket) -> None:
    for _ in range(3):
        client.sendall(ASK)
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            found += client.recv(65536)
        assert found.startswith(b"HTTP/1.1 200")
