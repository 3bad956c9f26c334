"""Limits of a connection: the time and the size of headers, and input that is not HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import pytest
import uvicorn
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from router.http import transports
from router.http.connections import Connection

TIMEOUT_S = 1.0
MAX_BYTES = 4096
LARGE_BYTES = 16 * 2**20
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class StrictConnection(Connection):
    headers_timeout_s = TIMEOUT_S
    max_header_bytes = MAX_BYTES
    write_timeout_s = TIMEOUT_S


left_early: list[str] = []
"""The requests on `/watched` whose client has gone, by their query."""
finished: list[str] = []
"""The requests on `/watched` that ran to their end."""


async def watch_client(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer in a second, unless the client closes its connection before."""
    query = scope["query_string"].decode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while (await receive())["type"] != "http.disconnect":
                pass
        left_early.append(query)
    except TimeoutError:
        await send({"type": "http.response.body", "body": b"end"})
        finished.append(query)


async def answer_slowly(scope: Scope, receive: Receive, send: Send) -> None:
    """Stream eight parts; on `/slow` this takes twice as long as headers may, on `/large` they are
    more than any buffer takes."""
    if scope["path"] == "/watched":
        await watch_client(scope, receive, send)
        return
    if scope["path"] == "/large":
        await Response(bytes(LARGE_BYTES))(scope, receive, send)
        return

    if scope["path"] == "/block":
        time.sleep(3 * TIMEOUT_S)
    if scope["path"] == "/echo":
        message = await receive()

        async def echo() -> AsyncIterator[bytes]:
            yield message["body"]

        await StreamingResponse(echo())(scope, receive, send)
        return

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b"part\n"
            await asyncio.sleep(TIMEOUT_S / 4 if scope["path"] == "/slow" else 0)

    reads = scope["method"] == "POST" and scope["path"] != "/unread"
    while reads and (await receive()).get("more_body"):
        pass
    await StreamingResponse(parts())(scope, receive, send)


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """The address of a server on a thread of its own, with short limits."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        answer_slowly, http=StrictConnection, lifespan="off", log_config=None, timeout_keep_alive=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(60)
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


def read_large(client: socket.socket, pause_s: float = 0.0) -> int:
    """Return how many bytes arrive until the server closes, with pauses between reads."""
    received = 0
    while piece := client.recv(2**20):
        received += len(piece)
        time.sleep(pause_s)
    return received


def read_answer(client: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        received = client.recv(65536)
        assert received, found
        found += received
    return found


def is_answered(client: socket.socket, sent: bytes) -> bool:
    client.sendall(sent)
    return read_answer(client).startswith(b"HTTP/1.1 200")


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
    read_answer(client)
    client.sendall(b"\r\n")
    assert read_to_end(client) == b""


CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
MANY = REQUEST[:-2] + b"a:b\r\n" * 500 + b"\r\n"
LONG = REQUEST[:-2] + b"a: " + b"b" * MAX_BYTES


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        pytest.param(LONG, 431, "headers_too_large", id="a long header"),
        pytest.param(LONG + b"\r\n\r\n", 431, "headers_too_large", id="long and complete"),
        pytest.param(MANY, 431, "headers_too_large", id="many headers"),
        pytest.param(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
            505,
            "http_version_not_supported",
            id="HTTP/2",
        ),
        pytest.param(b"\x16\x03\x01 this is TLS\r\n\r\n", 400, "invalid_http", id="no HTTP"),
        pytest.param(CHUNKED % b"/" + b"no size\r\n", 400, "invalid_http", id="a chunk of no size"),
    ],
)
def test_a_request_that_is_too_large_or_malformed_is_refused(
    client: socket.socket, sent: bytes, status: int, code: str
) -> None:
    client.sendall(sent)
    assert error_code(read_to_end(client), status) == code


def test_an_answer_may_take_longer_than_headers(client: socket.socket) -> None:
    client.sendall(REQUEST.replace(b" / ", b" /slow "))
    client.sendall(REQUEST[:-4])  # the next one begins; its time counts from the end of this answer
    assert read_answer(client).count(b"part\n") == 8
    assert error_code(read_to_end(client), 408) == "request_timeout"


def test_a_body_may_arrive_after_its_answer(client: socket.socket) -> None:
    size = 10 * MAX_BYTES
    head = b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
    for _ in range(2):
        assert is_answered(client, head)
        for _ in range(10):
            client.sendall(bytes(size // 10))
            time.sleep(0.01)
        assert is_answered(client, REQUEST)
    assert is_answered(client, head)
    client.sendall(b"the rest never comes")
    assert read_to_end(client) == b""


@pytest.mark.parametrize("path", [b"/", b"/unread"])
def test_a_bodys_end_may_arrive_with_the_next_request(client: socket.socket, path: bytes) -> None:
    size = 10 * MAX_BYTES
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path, size)
    client.sendall(head)
    if path == b"/unread":
        read_answer(client)
    client.sendall(bytes(size) + REQUEST[:-2])
    if path == b"/":
        read_answer(client)
    assert is_answered(client, b"a: b\r\n\r\n")


@pytest.mark.parametrize(
    "rest", [b"no size\r\n", b"1\r\nab\r\n", b"0\r\na: " + b"b" * 2 * MAX_BYTES]
)
def test_a_request_with_a_bad_rest_is_answered_once(client: socket.socket, rest: bytes) -> None:
    assert is_answered(client, CHUNKED % b"/unread")
    client.sendall(rest)
    assert read_to_end(client) == b""


@pytest.mark.parametrize("path", [b"/", b"/unread"])
@pytest.mark.parametrize("ending", [b"0\r\na: ", b"0\r\na", b"1;a="])
def test_trailers_and_extensions_of_chunks_that_do_not_end_are_refused(
    client: socket.socket, path: bytes, ending: bytes
) -> None:
    """By a 431, or if there was an answer, by the end of the connection."""
    client.sendall(CHUNKED % path + b"4\r\nbody\r\n" + ending)
    if path == b"/unread":
        read_answer(client)
    for _ in range(2):
        time.sleep(0.05)
        client.sendall(b"b" * (MAX_BYTES // 2 + 1))
    refusal = read_to_end(client)
    assert (refusal == b"") == (path == b"/unread")
    assert not refusal or error_code(refusal, 431) == "headers_too_large"


@pytest.mark.parametrize("framing", [b"content-length: 4\r\n", b"transfer-encoding: chunked\r\n"])
def test_a_request_for_http_2_is_served_with_a_body(client: socket.socket, framing: bytes) -> None:
    """Java's HttpClient asks in each request to an address without TLS."""
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    body = b"body" if b"4" in framing else b"4\r\nbody\r\n0\r\n\r\n"
    for protocol in (b"h2c", b"websocket", b"h2c"):
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\n%supgrade: %s\r\n%s\r\n"
        client.sendall(head % (upgrade, protocol, framing) + body)
        assert read_answer(client).endswith(b"\r\n4\r\nbody\r\n0\r\n\r\n")
    client.sendall(REQUEST[:-2] + upgrade + b"upgrade: h2c\r\n\r\n")
    assert read_answer(client).startswith(b"HTTP/1.1 200")


def test_small_chunks_are_no_headers(client: socket.socket) -> None:
    client.sendall(CHUNKED % b"/")
    for _ in range(4):
        client.sendall(b"1\r\na\r\n" * (MAX_BYTES // 4))
        time.sleep(0.01)
    assert is_answered(client, b"0\r\na: trailer\r\n\r\n")


def test_a_client_that_closes_ends_its_pipelined_requests(address: tuple[str, int]) -> None:
    left_early.clear()
    with socket.create_connection(address) as client:
        for number in range(3):
            client.sendall(b"GET /watched?%d HTTP/1.1\r\nhost: x\r\n\r\n" % number)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")  # the first one runs
    time.sleep(2 * TIMEOUT_S)
    assert left_early == ["0"]
    assert not finished


def test_few_requests_may_wait_on_one_connection(client: socket.socket) -> None:
    client.sendall(b"GET /watched HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
    read_to_end(client)
    finished.clear()


@contextmanager
def not_reading(address: tuple[str, int]) -> Iterator[socket.socket]:
    """Yield a client with a small buffer."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(address)
        yield client


@pytest.mark.parametrize("ending", [b"", b"connection: close\r\n"])
def test_a_client_that_never_reads_is_cut_off(
    address: tuple[str, int], ending: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "CLOSE_TIMEOUT_S", TIMEOUT_S)
    with not_reading(address) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n" + ending + b"\r\n")
        time.sleep(2.5 * TIMEOUT_S)
        received = 0
        with suppress(ConnectionResetError):
            while piece := client.recv(2**20):
                received += len(piece)
        assert received < LARGE_BYTES


def test_a_server_that_stood_still_does_not_blame_its_clients(address: tuple[str, int]) -> None:
    with (
        socket.create_connection(address, timeout=20) as new,
        socket.create_connection(address, timeout=20) as other,
        not_reading(address) as reading,
    ):
        reading.sendall(LARGE)
        new.sendall(REQUEST[:9])
        time.sleep(TIMEOUT_S / 4)
        other.sendall(REQUEST.replace(b" / ", b" /block "))
        time.sleep(2 * TIMEOUT_S)
        new.sendall(REQUEST[9:])
        for client in (other, new):
            assert read_answer(client).startswith(b"HTTP/1.1 200")
        assert read_large(reading) > LARGE_BYTES


def test_a_client_that_reads_slowly_gets_everything(client: socket.socket) -> None:
    client.sendall(LARGE)
    assert read_large(client, pause_s=0.05) > LARGE_BYTES
