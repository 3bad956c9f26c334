"""Bad requests, bad bytes and many clients at once: each gets its answer, and all goes on."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import math
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared import wire
from shared.hashing import HASH_BYTES
from tests.conftest import unused_port
from tests.e2e.by_hand import Process, started
from tests.e2e.rubbish import Peer, knock, rubbish
from tests.e2e.server import Server, serving
from tests.tiny_models import make_tiny

KEY = "a-secret-key"
BODY_LIMIT = 65_536
BODY_TIMEOUT_S = 30.0
PATIENCE_S = 30.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
NAN = float("nan")


class SlowClient:
    """Sends the beginning of a body and then nothing more."""

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
    """Where the processes of `server` meet."""
    with private_directory() as directory:
        yield Path(directory)


def private_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mlms-", dir="/tmp")  # short: paths of sockets


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


@pytest.fixture(scope="module")
def slow_client(server: Server) -> SlowClient:
    return SlowClient(server.port)


@pytest.fixture
def pids(server: Server) -> Iterator[list[int]]:
    """The server's processes, which are the same ones and serve after the test."""
    before = sorted(server.pids())
    yield before
    answer = server.complete("abc", 4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4
    assert sorted(server.pids()) == before
    assert server.is_ready()


def assert_error(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert code is None or error["code"] == code
    return error


# -- the error table --------------------------------------------------------------


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
def test_what_is_no_json_object_is_a_400(server: Server, pids: list[int], body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert_error(server.client.post(COMPLETIONS, content=body, headers=headers), 400)


def test_no_key_and_a_wrong_key_are_a_401(server: Server, pids: list[int]) -> None:
    for header in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"):
        answer = server.client.post(
            COMPLETIONS, json={"prompt": "a"}, headers={"authorization": header}
        )
        assert_error(answer, 401, "invalid_api_key")
        assert KEY not in answer.text


def test_unknown_models_and_paths_are_a_404_and_wrong_methods_a_405(
    server: Server, pids: list[int]
) -> None:
    error = assert_error(server.post(COMPLETIONS, prompt="a", model="gpt-9"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert_error(server.client.get("/v1/models/gpt-9"), 404, "model_not_found")
    assert_error(server.post("/v1/embeddings", input="a"), 501, "not_served")
    assert_error(server.client.get("/v2"), 404)
    answer = server.client.delete(COMPLETIONS)
    assert_error(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_large_body_is_a_413_chunked_and_compressed_too(server: Server, pids: list[int]) -> None:
    large = json.dumps({"prompt": "x" * BODY_LIMIT}).encode()
    headers = {"content-type": "application/json"}
    for content in (large, iter([large[:9999], large[9999:]])):
        assert_error(server.client.post(COMPLETIONS, content=content, headers=headers), 413)
    bomb = gzip.compress(b" " * 1000 * BODY_LIMIT)
    headers["content-encoding"] = "gzip"
    assert_error(server.client.post(COMPLETIONS, content=bomb, headers=headers), 413)


def test_what_is_not_json_by_its_type_is_a_415(server: Server, pids: list[int]) -> None:
    answer = server.client.post(COMPLETIONS, data={"prompt": "a"})
    assert_error(answer, 415)
    headers = {"content-type": "application/json", "content-encoding": "br"}
    assert_error(server.client.post(COMPLETIONS, content=b"{}", headers=headers), 415)


def test_the_clients_own_request_id_is_kept(server: Server, pids: list[int]) -> None:
    for fields in ({"prompt": "a", "max_tokens": 1}, {}):
        answer = server.client.post(COMPLETIONS, json=fields, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"


def test_no_http_at_all_harms_nobody(
    server: Server, slow_client: SlowClient, pids: list[int]
) -> None:
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
                pass  # hung up on, which is an answer


def test_64_clients_that_connect_at_once_are_all_served(server: Server, pids: list[int]) -> None:
    async def everybody() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}",
            headers=server.client.headers,
            limits=httpx.Limits(max_connections=None),
            timeout=120,
        ) as client:
            bodies = [{"prompt": f"client {i}", "max_tokens": 4} for i in range(64)]
            return await asyncio.gather(*(client.post(COMPLETIONS, json=b) for b in bodies))

    assert [answer.status_code for answer in asyncio.run(everybody())] == [200] * 64


# -- rubbish on the sockets between the processes -----------------------------------


def hello(**fields: Any) -> wire.Hello:
    plain: dict[str, Any] = {
        "protocol": wire.PROTOCOL_VERSION,
        "engine": "rubbish",
        "incarnation": "i",
        "model": "rubbish",
        "aliases": [],
        "fingerprint": "f",
        "context_length": 100,
        "vocab_size": 100,
        "block_size": 16,
        "total_blocks": 100,
        "max_sequences": 4,
        "max_batch_size": 4,
        "namespace": b"n",
        "eos_token_ids": [],
        "files": {},
    }
    return wire.Hello(**plain | fields)


def beat(**fields: Any) -> wire.Beat:
    plain: dict[str, Any] = {
        "engine": "rubbish",
        "incarnation": "i",
        "number": 1,
        "phase": "ready",
        "phase_s": 1.0,
        "stalled_s": 0.0,
        "live": [],
        "stats": wire.EngineStats(),
    }
    return wire.Beat(**plain | fields)


DELTA = wire.Delta(request_id="nobody's", attempt=-1, index=-5, token_ids=[-1, 2**40])
TO_ROUTER: list[wire.Message] = [
    hello(protocol=-1),
    hello(protocol=2**63),
    hello(block_size=0),
    hello(block_size=-16),
    hello(context_length=-1),
    hello(vocab_size=0),
    hello(max_sequences=-1),
    hello(model=""),
    beat(),
    beat(number=-1, phase_s=NAN, stalled_s=-math.inf, phase="loading"),
    beat(engine="engine-0", stats=wire.EngineStats(limit_bytes=-1, unevictable_bytes=2**63)),
    beat(live=[wire.LiveRequest(request_id="nobody's", attempt=2**63, generated=-1)] * 1000),
    wire.Accepted(request_id="nobody's", attempt=0),
    wire.Refused(request_id="nobody's", attempt=0, reason="full", message=""),
    wire.Tokens(deltas=[DELTA] * 1000),
    wire.CacheEvents(number=-1, added=[b""] * 1000, removed=[b"x"]),
    wire.Files(names=["../../tmp/x", "tokenizer.json"]),
    wire.Bye(engine="engine-0", incarnation="i"),
]


def test_rubbish_from_an_engine_is_counted_dropped_and_harms_nobody(
    server: Server, sockets: Path, pids: list[int]
) -> None:
    endpoint = f"ipc://{sockets}/engines"
    before = server.metric("mlx_lm_server_dropped_messages_total")
    sent = rubbish(TO_ROUTER)
    with Peer(endpoint) as peer:
        for frames in sent:
            peer.send_raw(frames)
        server.wait_until(
            lambda: server.metric("mlx_lm_server_dropped_messages_total") == before + len(sent),
            PATIENCE_S,
            f"{len(sent)} messages counted",
        )
    knock(endpoint)


@pytest.mark.parametrize("message", TO_ROUTER, ids=lambda m: type(m).__name__)
def test_an_engine_that_talks_nonsense_harms_nobody(
    server: Server, sockets: Path, pids: list[int], message: wire.Message
) -> None:
    with Peer(f"ipc://{sockets}/engines") as peer:
        peer.send(message, b"content", b"more content", b"and more than names")
        peer.send(wire.CacheEvents(number=1, added=[], removed=[]))
        ping = peer.hear(wire.Ping, wire.ToEngine)  # so it has been heard up to there
        assert ping.protocol == wire.PROTOCOL_VERSION
        assert server.is_ready()
        assert server.client.get("/health").json()["status"] == "ok"
        assert server.metric("mlx_lm_server_engine_ready") == 1
        models = server.client.get("/v1/models").json()["data"]
        assert len(models) == 1 and models[0]["ready_replicas"] == 1


HASH, NAMESPACE = bytes(HASH_BYTES), "00" * HASH_BYTES
TO_STORE: list[wire.Message] = [
    wire.Locate(),
    wire.Located(nonce="wrong"),
    wire.Has(ticket=1, namespace=NAMESPACE, hashes=[HASH]),
    wire.Get(ticket=1, namespace=NAMESPACE, hashes=[HASH]),
    wire.Put(ticket=1, namespace=NAMESPACE, hash=HASH),
    wire.Touch(namespace=NAMESPACE, hashes=[HASH]),
    wire.Corrupt(namespace=NAMESPACE, hash=HASH),
    wire.StoreStatsWanted(),
]


def dropped(peer: Peer) -> int:
    """Messages that the kvstore has dropped so far."""
    peer.send(wire.StoreStatsWanted())
    return peer.hear(wire.StoreStatsReply, wire.FromStore).stats.dropped_messages_total


def test_rubbish_at_the_kvstore_is_counted_dropped_and_harms_nobody(
    server: Server, sockets: Path, pids: list[int]
) -> None:
    endpoint = f"ipc://{sockets}/kvstore"
    sent = rubbish(TO_STORE)
    with Peer(endpoint) as peer:
        before = dropped(peer)
        for frames in sent:
            peer.send_raw(frames)
        assert dropped(peer) == before + len(sent)
    knock(endpoint)


def test_nonsense_at_the_kvstore_harms_nobody(
    server: Server, sockets: Path, pids: list[int]
) -> None:
    """Names that lead out of its directory, hashes that are none, files that are none."""
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
        assert peer.hear(wire.HasReply, wire.FromStore).count == 0
        peer.send(wire.Get(ticket=7, namespace=NAMESPACE, hashes=[]))
        assert peer.hear(wire.GetReply, wire.FromStore).count == 0


# -- an engine alone, and a router that is none ---------------------------------------


class FakeRouter:
    """Binds where an engine connects, and says what a router never would."""

    def __init__(self, endpoint: str) -> None:
        self.peer = Peer(endpoint, bind=True)
        self.peer.hear(wire.Beat, wire.ToRouter)
        self._number = 0

    def meet(self) -> wire.Hello:
        self.peer.send(wire.Ping(router_id="not really"))
        return self.peer.hear(wire.Hello, wire.ToRouter)

    def run(self, **fields: Any) -> wire.Refused | int:
        """The refusal of a request, or how many tokens it gave."""
        self._number += 1
        plain: dict[str, Any] = {
            "request_id": f"r{self._number}",
            "attempt": 0,
            "token_ids": [5, 6, 7],
            "sampling": wire.SamplingParams(seed=1),
            "max_tokens": 3,
            "stop_token_ids": [],
        }
        submit = wire.Submit(**plain | fields)
        self.peer.send(submit)
        tokens = 0
        while True:
            message = self.peer.hear(wire.Message, wire.ToRouter)
            if isinstance(message, wire.Refused) and message.request_id == submit.request_id:
                return message
            for delta in message.deltas if isinstance(message, wire.Tokens) else ():
                if delta.request_id != submit.request_id:
                    continue
                tokens += len(delta.token_ids)
                if delta.finish is not None:
                    assert delta.finish == "length", delta
                    return tokens


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Iterator[tuple[Process, FakeRouter]]:
    with ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        endpoint = f"ipc://{directory}/engines"
        process = stack.enter_context(
            started(
                "services.engine",
                *("--model", str(tiny_model("llama")), "--engine-socket", endpoint, "--no-ssd"),
                _MLX_LM_SERVER_CHECK_INTEGRITY="1",
            )
        )
        router = FakeRouter(endpoint)
        stack.callback(router.peer.close)
        router.meet()
        yield process, router


TO_ENGINE: list[wire.Message] = [
    wire.Ping(router_id="r"),
    wire.Submit(
        request_id="r",
        attempt=0,
        token_ids=[5],
        sampling=wire.SamplingParams(seed=1),
        max_tokens=1,
        stop_token_ids=[],
    ),
    wire.Abort(request_id="r"),
    wire.FilesWanted(names=["config.json"]),
]


def test_rubbish_from_a_router_is_counted_dropped_and_harms_nobody(
    engine: tuple[Process, FakeRouter],
) -> None:
    process, router = engine
    sent = rubbish(TO_ENGINE)
    for frames in sent:
        router.peer.send_raw(frames)
    while True:
        stats = router.peer.hear(wire.Beat, wire.ToRouter).stats
        if stats.dropped_messages_total >= len(sent):
            break
    assert stats.dropped_messages_total == len(sent)
    assert router.run() == 3
    assert process.runs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [-1]}, "prompt"),
        ({"token_ids": [320]}, "prompt"),
        ({"token_ids": [2**63]}, "prompt"),
        ({"token_ids": [5] * 1_000_000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -(2**40)}, "max_tokens"),
        ({"generated": [2**40]}, "generated"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    engine: tuple[Process, FakeRouter], fields: dict[str, Any], param: str
) -> None:
    process, router = engine
    refused = router.run(**fields)
    assert isinstance(refused, wire.Refused)
    assert refused.param == param
    assert refused.reason in ("invalid", "too_large")
    assert router.run() == 3
    assert process.runs


def sampling(**fields: Any) -> dict[str, wire.SamplingParams]:
    return {"sampling": wire.SamplingParams(**{"seed": 1, "temperature": 1.0} | fields)}


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": ""},
        {"request_id": "x" * 1_000_000},
        {"attempt": -(2**63)},
        {"attempt": 2**63},
        {"priority": -(2**63)},
        {"priority": 2**63},
        {"min_tokens": 2**63},
        {"min_tokens": -1},
        {"min_tokens": 5, "stop_token_ids": list(range(320))},
        {"min_tokens": 5, "stop_token_ids": [5] * 100_000},
        {"cache_salt": "\x00" * 100_000},
        sampling(temperature=NAN),
        sampling(temperature=math.inf),
        sampling(temperature=-1.0),
        sampling(temperature=1e-300),
        sampling(temperature=1e300),
        sampling(top_p=NAN),
        sampling(top_p=-1.0),
        sampling(top_p=1e-300),
        sampling(top_p=2.0),
        sampling(top_k=-(2**63)),
        sampling(top_k=2**63),
        sampling(min_p=NAN),
        sampling(min_p=math.inf),
        sampling(min_p=-1.0),
        sampling(seed=-(2**63)),
        sampling(seed=2**64 - 1),
    ],
    ids=lambda fields: "-".join(fields),
)
def test_values_without_sense_that_can_be_served_are(
    engine: tuple[Process, FakeRouter], fields: dict[str, Any]
) -> None:
    process, router = engine
    assert router.run(**fields) == 3
    assert process.runs


def test_max_tokens_without_sense_ends_with_the_context(
    engine: tuple[Process, FakeRouter],
) -> None:
    process, router = engine
    assert router.run(token_ids=[5] * 2000, max_tokens=2**63) == 48
    assert process.runs


def test_a_request_that_was_complete_already_ends_at_once(
    engine: tuple[Process, FakeRouter],
) -> None:
    process, router = engine
    assert router.run(generated=[5] * 50) == 0
    assert router.run() == 3
    assert process.runs


def test_the_same_request_twice_and_a_thousand_aborts_harm_nobody(
    engine: tuple[Process, FakeRouter],
) -> None:
    process, router = engine
    submit = wire.Submit(
        request_id="twice",
        attempt=0,
        token_ids=[5],
        sampling=wire.SamplingParams(seed=1),
        max_tokens=500,
        stop_token_ids=[],
    )
    for _ in range(3):
        router.peer.send(submit)
    for number in range(1000):
        router.peer.send(wire.Abort(request_id=f"nobody-{number}"))
    router.peer.send(wire.Abort(request_id="twice"))
    router.peer.send(wire.Ping(router_id="another"))
    router.peer.hear(wire.Hello, wire.ToRouter)
    assert router.run() == 3
    assert process.runs


# -- limits --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """One place in the engine, one in the queue, and memory that is soon short."""
    flags = (
        *("--max-batch-size", "1", "--prefill-batch-size", "1", "--completion-batch-size", "1"),
        *("--max-queue-size", "1", "--first-token-timeout-s", "2", "--no-ssd"),
        *("--num-blocks", "100"),
    )
    with serving(tiny_model("llama"), *flags) as running:
        yield running


def assert_retry(answer: httpx.Response, status: int, code: str) -> None:
    assert_error(answer, status, code)
    assert int(answer.headers["retry-after"]) >= 1


def ask(server: Server, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{server.port}{COMPLETIONS}",
        json={"prompt": "abc", "max_tokens": 4, **fields},
        timeout=60,
    )


def test_a_full_queue_is_a_429_and_no_token_in_time_a_504(small_server: Server) -> None:
    server = small_server
    (engine,) = server.pids("services.engine")
    with ThreadPoolExecutor(2) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            placed = pool.submit(ask, server)
            server.wait_until(lambda: requests(server) == 1, PATIENCE_S, "one with the engine")
            queued = pool.submit(ask, server)
            server.wait_until(lambda: server.metric("queued_requests") == 1, PATIENCE_S, "queued")
            assert_retry(ask(server), 429, "queue_full")
            assert_error(placed.result(), 504, "timeout")
            assert_error(queued.result(), 504, "timeout")
        finally:
            os.kill(engine, signal.SIGCONT)
    server.wait_until(lambda: ask(server).status_code == 200, PATIENCE_S, "served again")


def requests(server: Server) -> int:
    return int(server.client.get("/health").json()["requests"])


def test_what_could_not_fit_in_memory_alone_is_a_400(small_server: Server) -> None:
    answer = ask(small_server, prompt=[5] * 900, max_tokens=900)
    assert assert_error(answer, 400, "request_too_large")["param"] == "max_tokens"
    assert ask(small_server, prompt=[5] * 900, max_tokens=4).status_code == 200


def test_memory_pressure_is_a_503(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "llama")
    long_enough = 100_000  # for some beats to tell of the memory it takes, on any machine
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 2 * long_enough
    (model / "config.json").write_text(json.dumps(config))
    flags = (
        *("--num-blocks", str(long_enough // 16 + 100), "--memory-pressure-threshold", "0.001"),
        *("--max-generation-tokens", str(long_enough), "--no-ssd"),
    )
    endless = {"prompt": "abc", "max_tokens": long_enough, "ignore_eos": True, "stream": True}
    with serving(model, *flags) as server:
        with server.client.stream("POST", COMPLETIONS, json=endless) as running:
            assert running.status_code == 200
            answers: list[httpx.Response] = []

            def is_refused() -> bool:
                answers[:] = [ask(server)]
                return answers[0].status_code != 200

            server.wait_until(is_refused, PATIENCE_S, "one is refused")
        assert_retry(answers[0], 503, "memory_pressure")
        server.wait_until(lambda: ask(server).status_code == 200, PATIENCE_S, "served")


def test_a_server_that_drains_answers_503(small_server: Server) -> None:
    """Last of those on this server: it ends."""
    server = small_server
    (engine,) = server.pids("services.engine")
    with ThreadPoolExecutor(1) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            running = pool.submit(ask, server)
            server.wait_until(lambda: requests(server) == 1, PATIENCE_S, "one with the engine")
            server.process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: not server.is_ready(), PATIENCE_S, "draining")
            assert_retry(ask(server), 503, "shutting_down")
            assert_error(running.result(), 504, "timeout")
        finally:
            os.kill(engine, signal.SIGCONT)
    assert server.process.wait(PATIENCE_S) == 0


# -- processes that are started one by one ---------------------------------------------


def test_two_engines_join_one_router_and_one_goes_on_alone(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Router, kvstore and two engines, the router behind a tcp socket."""
    with ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        engines = f"tcp://127.0.0.1:{unused_port()}"
        blocks = f"ipc://{directory}/kvstore"
        flags = [
            *("--model", str(tiny_model("llama"))),
            *("--engine-socket", engines, "--kvstore-socket", blocks),
            *("--ssd-cache-dir", str(tmp_path / "ssd")),
        ]
        stack.enter_context(started("services.kvstore", *flags))
        router = stack.enter_context(
            started("services.router", *flags, "--host", "127.0.0.1", "--port", "0")
        )
        url = router.wait_for(r"listening on (\S+)")[1]
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60))

        def complete(number: int) -> httpx.Response:
            body = {"prompt": f"{number} abc", "max_tokens": 40, "ignore_eos": True}
            return client.post(COMPLETIONS, json=body)

        def busy() -> dict[str, float]:
            """Tokens that each engine has generated, by its name."""
            pattern = r'mlx_lm_server_generated_tokens_total\{engine="([^"]+)".*\} (\S+)'
            return {e: float(v) for e, v in re.findall(pattern, client.get("/metrics").text)}

        def eventually(condition: Callable[[], bool], what: str) -> None:
            deadline = time.monotonic() + PATIENCE_S
            while not condition():
                assert time.monotonic() < deadline, (what, *router.log[-20:])
                time.sleep(0.05)

        assert_retry(complete(0), 503, "no_engine_ready")
        both = [
            stack.enter_context(started("services.engine", *flags, _MLX_LM_SERVER_ENGINE=name))
            for name in ("left", "right")
        ]
        eventually(lambda: len(busy()) == 2 and ready(client) == 2, "both have joined")
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(complete, range(24)))
            assert [answer.status_code for answer in answers] == [200] * 24
            eventually(lambda: all(busy().values()), "both get work")
            flying = [pool.submit(complete, number) for number in range(24)]
            both[0].popen.kill()
            # What had shown nothing yet is done by the other one.
            assert [future.result().status_code for future in flying] == [200] * 24
        eventually(lambda: ready(client) == 1, "one is left")
        assert complete(1).status_code == 200


def ready(client: httpx.Client) -> int:
    models = client.get("/v1/models").json()["data"]
    return int(models[0]["ready_replicas"]) if models else 0


# -- what takes long ------------------------------------------------------------------


def test_a_body_that_does_not_arrive_is_a_408(
    server: Server, slow_client: SlowClient, pids: list[int]
) -> None:
    """Last of all, so that the client has been slow long enough by now."""
    response, body = slow_client.answer()
    assert response.status == 408, body
    assert response.headers["x-request-id"]
    assert json.loads(body)["error"]["code"] == "request_timeout"
