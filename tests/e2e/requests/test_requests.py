"""Limits, malformed messages and concurrent clients: each is answered, and nothing ends.

What the router refuses alone is in `tests/router/api/test_errors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from tests.e2e.server import Server, assert_error, at_once, private_directory, serving

KEY = "a-secret-key"
PATIENCE_S = 90.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


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
        *("--max-prompt-tokens", "1000"),
        *("--max-generation-tokens", "1500"),
    )
    with serving(tiny_model("llama"), *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


@pytest.fixture
def pids(server: Server) -> Iterator[list[int]]:
    """Check that the processes are still the same after the test, and still serve."""
    before = sorted(server.pids())
    yield before
    answer = server.complete("abc", 4, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 4
    assert sorted(server.pids()) == before
    assert server.is_ready()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        (COMPLETIONS, {"prompt": [5] * 1001}, "prompt"),
        (COMPLETIONS, {"prompt": [320]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [320]}, "stop_token_ids"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_limits_of_flags_and_of_the_model_are_400s(
    server: Server, pids: list[int], path: str, fields: dict[str, Any], param: str, streaming: bool
) -> None:
    answer = server.post(path, **{"stream": streaming} | fields)
    assert assert_error(answer, 400)["param"] == param


def test_all_of_64_concurrent_clients_are_served(server: Server, pids: list[int]) -> None:
    def post(number: int) -> int:
        body = {"prompt": f"client {number}", "max_tokens": 4}
        return server.post(COMPLETIONS, **body).status_code

    assert at_once(post, range(64)) == [200] * 64


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
        send_foreign_bytes(endpoint)  # of which some look like messages
        assert dropped(peer) >= before + len(sent)


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
