"""Bad requests, malformed messages and concurrent clients: each is answered, and nothing ends."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared import wire
from tests.e2e.requests.malformed import (
    HASH,
    NAMESPACE,
    TO_ROUTER,
    TO_STORE,
    Peer,
    malformed,
    send_foreign_bytes,
)
from tests.e2e.server import Server, assert_error, private_directory, serving

KEY = "a-secret-key"
BODY_LIMIT = 65_536
BODY_TIMEOUT_S = 30.0
PATIENCE_S = 90.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


class SlowClient:
    """Sends the beginning of a body and nothing more."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=BODY_TIMEOUT_S + 20)
        self._socket.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{".encode()
        )

    def answer(self) -> tuple[http.client.HTTPResponse, bytes]:
        with self._socket:
            response = http.client.HTTPResponse(self._socket)
            response.begin()
            return response, response.read()


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """Yield the directory with the sockets between the processes of `server`."""
    with private_directory() as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path], sockets: Path) -> Iterator[Server]:
    flags = (
        *("--api-key", KEY),
        *("--engine-socket", f"ipc://{sockets}/engines"),
        *("--kvstore-socket", f"ipc://{sockets}/kvstore"),
        *("--max-request-bytes", str(BODY_LIMIT)),
        *("--max-prompt-tokens", "1000"),
        *("--max-generation-tokens", "1500"),
    )
    with serving(tiny_model("llama"), *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module", autouse=True)
def slow_client(server: Server) -> SlowClient:
    """Return a client that is slow from the first test on, for the last one."""
    return SlowClient(server.port)


@pytest.fixture
def pids(server: Server) -> Iterator[list[int]]:
    """Check that the processes are still the same after the test, and still serve."""
    before = sorted(server.pids())
    yield before
    answer = server.complete("abc", 4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4
    assert sorted(server.pids()) == before
    assert server.is_ready()


# -- bad requests -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": HI, "temperature": -1}, "temperature"),
        (CHAT, {"messages": HI, "max_tokens": -1}, "max_tokens"),
        (CHAT, {"messages": HI, "max_completion_tokens": 1501}, "max_tokens"),
        (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [320]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 1001}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 99, "n": 16}, "n"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**64}, "seed"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [320]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_field_is_a_400_that_names_it(
    server: Server, pids: list[int], path: str, fields: dict[str, Any], param: str, streaming: bool
) -> None:
    answer = server.post(path, **({"stream": streaming} | fields))
    assert assert_error(answer, 400)["param"] == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"\xff\xfe{}", b"[" * 10_000, b'{"prompt": NaN}', b"{}x"]
)
def test_a_body_that_is_no_json_object_is_a_400(
    server: Server, pids: list[int], body: bytes
) -> None:
    headers = {"content-type": "application/json"}
    assert_error(server.client.post(COMPLETIONS, content=body, headers=headers), 400)


def test_a_missing_or_wrong_key_is_a_401(server: Server, pids: list[int]) -> None:
    for header in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"):
        answer = server.client.post(
            COMPLETIONS, json={"prompt": "a"}, headers={"authorization": header}
        )
        assert_error(answer, 401, "invalid_api_key")
        assert KEY not in answer.text


def test_an_unknown_model_or_path_is_a_404_and_a_wrong_method_a_405(
    server: Server, pids: list[int]
) -> None:
    error = assert_error(server.post(COMPLETIONS, prompt="a", model="gpt-9"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert_error(server.client.get("/v1/models/gpt-9"), 404, "model_not_found")
    assert_error(server.post("/v1/images", prompt="a"), 501, "not_served")
    refused = server.post(
        "/v1/embeddings", input="a", model=server.client.get("/v1/models").json()["data"][0]["id"]
    )
    assert_error(refused, 400, "wrong_task")
    assert_error(server.client.get("/v2"), 404)
    answer = server.client.delete(COMPLETIONS)
    assert_error(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_large_body_is_a_413_even_if_chunked_or_compressed(
    server: Server, pids: list[int]
) -> None:
    large = json.dumps({"prompt": "x" * BODY_LIMIT}).encode()
    headers = {"content-type": "application/json"}
    for content in (large, iter([large[:9999], large[9999:]])):
        assert_error(server.client.post(COMPLETIONS, content=content, headers=headers), 413)
    bomb = gzip.compress(b" " * 1000 * BODY_LIMIT)
    headers["content-encoding"] = "gzip"
    assert_error(server.client.post(COMPLETIONS, content=bomb, headers=headers), 413)


def test_a_content_type_or_encoding_that_is_not_supported_is_a_415(
    server: Server, pids: list[int]
) -> None:
    answer = server.client.post(COMPLETIONS, data={"prompt": "a"})
    assert_error(answer, 415)
    headers = {"content-type": "application/json", "content-encoding": "br"}
    assert_error(server.client.post(COMPLETIONS, content=b"{}", headers=headers), 415)


def test_a_request_id_of_the_client_is_kept(server: Server, pids: list[int]) -> None:
    for fields in ({"prompt": "a", "max_tokens": 1}, {}):
        answer = server.client.post(COMPLETIONS, json=fields, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"


def test_bytes_that_are_not_http_do_no_harm(server: Server, pids: list[int]) -> None:
    requests = [
        b"\x16\x03\x01\x02\x00\x01\x00",
        os.urandom(4096),
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        b"\r\n" * 100,
    ]
    for request in requests:
        with socket.create_connection(("127.0.0.1", server.port), timeout=2) as client:
            try:
                client.sendall(request)
                client.shutdown(socket.SHUT_WR)
                assert b" 200 " not in client.recv(65_536)[:20]
            except (ConnectionError, TimeoutError):
                pass  # the server may also close the connection


def test_all_of_64_concurrent_clients_are_served(server: Server, pids: list[int]) -> None:
    async def post_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}",
            headers=server.client.headers,
            limits=httpx.Limits(max_connections=None),
            timeout=120,
        ) as client:
            bodies = [{"prompt": f"client {i}", "max_tokens": 4} for i in range(64)]
            return await asyncio.gather(*(client.post(COMPLETIONS, json=b) for b in bodies))

    assert [answer.status_code for answer in asyncio.run(post_all())] == [200] * 64


# -- malformed messages between the processes -------------------------------------------


def test_the_router_counts_and_drops_malformed_messages(
    server: Server, sockets: Path, pids: list[int]
) -> None:
    endpoint = f"ipc://{sockets}/engines"
    before = server.metric("mlx_lm_server_dropped_messages_total")
    sent = malformed(TO_ROUTER)
    with Peer(endpoint) as peer:
        for frames in sent:
            peer.send_raw(frames)
        server.wait_until(
            lambda: server.metric("mlx_lm_server_dropped_messages_total") == before + len(sent),
            PATIENCE_S,
            f"{len(sent)} messages counted",
        )
    send_foreign_bytes(endpoint)


@pytest.mark.parametrize("message", TO_ROUTER, ids=lambda m: type(m).__name__)
def test_nonsensical_messages_of_an_engine_do_no_harm(
    server: Server, sockets: Path, pids: list[int], message: wire.Message
) -> None:
    with Peer(f"ipc://{sockets}/engines") as peer:
        peer.send(message, b"content", b"more content", b"and more than names")
        peer.send(wire.CacheEvents(number=1, added=[], removed=[]))
        ping = peer.receive(wire.Ping, wire.ToEngine)  # so all messages before it have been read
        assert ping.protocol == wire.PROTOCOL_VERSION
        assert server.is_ready()
        assert server.client.get("/health").json()["status"] == "ok"
        assert server.metric("mlx_lm_server_engine_ready") == 1
        models = server.client.get("/v1/models").json()["data"]
        assert len(models) == 1 and models[0]["ready_replicas"] == 1


def dropped(peer: Peer) -> int:
    """Return the number of messages that the kvstore has dropped so far."""
    peer.send(wire.StoreStatsWanted())
    return peer.receive(wire.StoreStatsReply, wire.FromStore).stats.dropped_messages_total


def test_the_kvstore_counts_and_drops_malformed_messages(
    server: Server, sockets: Path, pids: list[int]
) -> None:
    endpoint = f"ipc://{sockets}/kvstore"
    sent = malformed(TO_STORE)
    with Peer(endpoint) as peer:
        before = dropped(peer)
        for frames in sent:
            peer.send_raw(frames)
        assert dropped(peer) == before + len(sent)
    send_foreign_bytes(endpoint)


def test_nonsensical_messages_do_the_kvstore_no_harm(
    server: Server, sockets: Path, pids: list[int]
) -> None:
    """Namespaces outside its directory, invalid hashes, payloads that are no block files."""
    with Peer(f"ipc://{sockets}/kvstore") as peer:
        before = dropped(peer)
        for namespace in ("", "../../../tmp", "/", "\x00", NAMESPACE[:-1], "0" * 10_000):
            peer.send(wire.Has(ticket=-1, namespace=namespace, hashes=[HASH]))
            peer.send(wire.Get(ticket=2**63, namespace=namespace, hashes=[HASH]))
            peer.send(wire.Put(ticket=0, namespace=namespace, hash=HASH), b"file")
            peer.send(wire.Corrupt(namespace=namespace, hash=HASH))
            peer.send(wire.Touch(namespace=namespace, hashes=[HASH]))
        for bad in (b"", b"..", bytes(1000)):
            peer.send(wire.Has(ticket=1, namespace=NAMESPACE, hashes=[bad]))
        for payload in ((), (b"one", b"two")):
            peer.send(wire.Put(ticket=1, namespace=NAMESPACE, hash=HASH), *payload)
        assert dropped(peer) == before + 6 * 5 + 3 + 2
        peer.send(wire.Locate(protocol=-1))
        peer.send(wire.Corrupt(namespace=NAMESPACE, hash=HASH))
        peer.send(wire.Has(ticket=7, namespace=NAMESPACE, hashes=[HASH] * 400_000))
        assert peer.receive(wire.HasReply, wire.FromStore).count == 0
        peer.send(wire.Get(ticket=7, namespace=NAMESPACE, hashes=[]))
        assert peer.receive(wire.GetReply, wire.FromStore).count == 0


# -- last -------------------------------------------------------------------------------


def test_a_body_that_does_not_arrive_is_a_408(
    server: Server, slow_client: SlowClient, pids: list[int]
) -> None:
    """Stands last: most of the timeout has passed during the other tests."""
    response, body = slow_client.answer()
    assert response.status == 408, body
    assert response.headers["x-request-id"]
    assert json.loads(body)["error"]["code"] == "request_timeout"
