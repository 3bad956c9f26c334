"""The limits of a server's memory. Those of queue and time, and a drain, are the router's alone:
`tests/router` has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, assert_retry, serving
from tests.tiny_models import make_tiny

PATIENCE_S = 90.0
LONG = 100_000
"""Tokens of an answer that lasts for some heartbeats, which report its memory, on any machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is full with one long answer, and short of memory long before."""
    path = tmp_path_factory.mktemp("models") / "llama"
    model = make_tiny("llama", path, max_position_embeddings=2 * LONG)
    flags = (
        *("--num-blocks", str(LONG // 16 + 100), "--memory-pressure-threshold", "0.001"),
        *("--max-generation-tokens", str(LONG), "--no-ssd"),
    )
    with serving(model, *flags) as running:
        yield running


def ask(server: Server, **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", **{"prompt": "abc", "max_tokens": 4, **fields})


def test_memory_pressure_is_a_503(server: Server) -> None:
    endless = {"prompt": "abc", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=endless) as running:
        assert running.status_code == 200
        answers: list[httpx.Response] = []

        def is_refused() -> bool:
            answers[:] = [ask(server)]
            return answers[0].status_code != 200

        server.wait_until(is_refused, PATIENCE_S, "a refusal")
    assert_retry(answers[0], 503, "memory_pressure")
    server.wait_until(lambda: ask(server).status_code == 200, PATIENCE_S, "served again")
