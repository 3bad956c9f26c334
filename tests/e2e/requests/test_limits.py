"""The limits of a server: queue, first token, memory, and requests during a drain."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, assert_error, assert_retry, serving
from tests.tiny_models import make_tiny

PATIENCE_S = 90.0
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def small_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """One place in the engine, one in the queue, and little memory."""
    flags = (
        *("--max-batch-size", "1", "--prefill-batch-size", "1", "--completion-batch-size", "1"),
        *("--max-queue-size", "1", "--first-token-timeout-s", "2", "--no-ssd"),
        *("--num-blocks", "100"),
    )
    with serving(tiny_model("llama"), *flags) as running:
        yield running


def ask(server: Server, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{server.port}{COMPLETIONS}",
        json={"prompt": "abc", "max_tokens": 4, **fields},
        timeout=60,
    )


def test_a_full_queue_is_a_429_and_a_late_first_token_a_504(small_server: Server) -> None:
    server = small_server
    (engine,) = server.pids("services.processes.engine")
    with ThreadPoolExecutor(2) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            placed = pool.submit(ask, server)
            server.wait_until(lambda: num_requests(server) == 1, PATIENCE_S, "one with the engine")
            queued = pool.submit(ask, server)
            server.wait_until(lambda: server.metric("queued_requests") == 1, PATIENCE_S, "queued")
            assert_retry(ask(server), 429, "queue_full")
            assert_error(placed.result(), 504, "timeout")
            assert_error(queued.result(), 504, "timeout")
        finally:
            os.kill(engine, signal.SIGCONT)
    server.wait_until(lambda: ask(server).status_code == 200, PATIENCE_S, "served again")


def num_requests(server: Server) -> int:
    return int(server.client.get("/health").json()["requests"])


def test_a_request_larger_than_memory_is_a_400(small_server: Server) -> None:
    answer = ask(small_server, prompt=[5] * 900, max_tokens=900)
    assert assert_error(answer, 400, "request_too_large")["param"] == "max_tokens"
    assert ask(small_server, prompt=[5] * 900, max_tokens=4).status_code == 200


def test_memory_pressure_is_a_503(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "llama")
    long_enough = 100_000  # for some heartbeats to report its memory, on any machine
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

            server.wait_until(is_refused, PATIENCE_S, "a refusal")
        assert_retry(answers[0], 503, "memory_pressure")
        server.wait_until(lambda: ask(server).status_code == 200, PATIENCE_S, "served again")


def test_a_draining_server_answers_503(small_server: Server) -> None:
    """Stands last: the server ends."""
    server = small_server
    (engine,) = server.pids("services.processes.engine")
    with ThreadPoolExecutor(1) as pool:
        os.kill(engine, signal.SIGSTOP)
        try:
            running = pool.submit(ask, server)
            server.wait_until(lambda: num_requests(server) == 1, PATIENCE_S, "one with the engine")
            server.process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: not server.is_ready(), PATIENCE_S, "draining")
            assert_retry(ask(server), 503, "shutting_down")
            assert_error(running.result(), 504, "timeout")
        finally:
            os.kill(engine, signal.SIGCONT)
    assert server.process.wait(PATIENCE_S) == 0
