"""Many requests to a server with little memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving

LONGEST = 400
BLOCKS = 64
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    flags = ("--num-blocks", str(BLOCKS), "--max-kv-size", str(LONGEST))
    with serving(tiny_model("llama"), *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


def complete(server: Server, body: dict[str, Any]) -> str:
    """Return the text. Try again while the server is short of memory, as it asks clients to."""
    deadline = time.monotonic() + PATIENCE_S
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    while True:
        answer = httpx.post(url, json=body, timeout=PATIENCE_S)
        if answer.status_code != 503 or time.monotonic() > deadline:
            break
        assert answer.json()["error"]["code"] == "memory_pressure"
        assert int(answer.headers["retry-after"]) >= 1
        time.sleep(0.1)  # sooner than Retry-After asks for
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.slow
def test_all_of_forty_requests_complete_with_memory_for_64_blocks(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    bodies: list[dict[str, Any]] = [
        {
            "prompt": [3 + (7 * number + place * place) % 300 for place in range(5 + number)],
            "max_tokens": 20 + 37 * number % 140,
            "temperature": 0,
            "ignore_eos": True,
            "priority": number % 3 // 2,
        }
        for number in range(40)
    ]
    usage: list[float] = []
    done = threading.Event()

    def watch() -> None:
        client = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S)
        while not done.wait(0.05):
            health = client.get("/health").json()
            (engine,) = health["models"][0]["engines"]
            usage.append(engine["blocks"]["used"] / BLOCKS)
            usage.append(engine["memory_pressure"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(len(bodies)) as pool:
        texts = list(pool.map(lambda body: complete(server, body), bodies))
    done.set()
    watcher.join()
    assert max(usage) <= 1.0
    preemptions = "mlx_lm_server_preemptions_total"
    server.wait_until(lambda: server.metric(preemptions) > 0, PATIENCE_S, "a preemption")
    unevictable = "mlx_lm_server_kv_unevictable_bytes"
    server.wait_until(lambda: server.metric(unevictable) == 0, PATIENCE_S, "all blocks free")
    for body, text in zip(bodies, texts, strict=True):
        assert text == complete(server, body)
    assert len(server.pids("services.processes.engine")) == 1
    assert not any("restarted" in line for line in server.log), "an engine was lost"


def test_max_kv_size_is_reported_and_enforced(server: Server) -> None:
    model = server.client.get("/v1/models").json()["data"][0]
    assert LONGEST in model.values()
    refused = server.post("/v1/completions", prompt=[5] * LONGEST, max_tokens=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    cut = server.complete([5] * (LONGEST - 3), 50, ignore_eos=True)
    assert cut["usage"]["completion_tokens"] == 3
    assert cut["choices"][0]["finish_reason"] == "length"
