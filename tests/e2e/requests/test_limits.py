"""The limits of a server's memory. Those of queue and time, and a drain, are the router's alone:
`tests/router` has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import Server, assert_error, assert_retry, serving
from tests.tiny_models import make_tiny

PATIENCE_S = 90.0


def ask(server: Server, **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", **{"prompt": "abc", "max_tokens": 4, **fields})


def test_a_request_larger_than_memory_is_a_400(tiny_model: Callable[..., Path]) -> None:
    with serving(tiny_model("llama"), "--num-blocks", "100", "--no-ssd") as server:
        answer = ask(server, prompt=[5] * 900, max_tokens=900)
        assert assert_error(answer, 400, "request_too_large")["param"] == "max_tokens"
        assert ask(server, prompt=[5] * 900, max_tokens=4).status_code == 200


def test_memory_pressure_is_a_503(tmp_path: Path) -> None:
    long_enough = 100_000  # for some heartbeats to report its memory, on any machine
    model = make_tiny("llama", tmp_path / "llama", max_position_embeddings=2 * long_enough)
    flags = (
        *("--num-blocks", str(long_enough // 16 + 100), "--memory-pressure-threshold", "0.001"),
        *("--max-generation-tokens", str(long_enough), "--no-ssd"),
    )
    endless = {"prompt": "abc", "max_tokens": long_enough, "ignore_eos": True, "stream": True}
    with serving(model, *flags) as server:
        with server.client.stream("POST", "/v1/completions", json=endless) as running:
            assert running.status_code == 200
            answers: list[httpx.Response] = []

            def is_refused() -> bool:
                answers[:] = [ask(server)]
                return answers[0].status_code != 200

            server.wait_until(is_refused, PATIENCE_S, "a refusal")
        assert_retry(answers[0], 503, "memory_pressure")
        server.wait_until(lambda: ask(server).status_code == 200, PATIENCE_S, "served again")
