"""Engines that are exchanged under load: nothing fails, and no text is broken."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.e2e.server import RESUMED, Server, events_of, serving
from tests.oracle import Oracle

PATIENCE_S = 120.0
LONG = 30_000
"""Tokens of a stream that nobody awaits the end of."""


def stream(
    server: Server,
    prompt: str,
    tokens: int,
    enough: Callable[[str], bool] = lambda text: False,
    **fields: float,
) -> tuple[str, float]:
    """Return the text of a stream, greedy unless ``fields`` say otherwise, and its longest pause in
    seconds. The client leaves when the text is ``enough``."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
    url = server.client.base_url.join("/v1/completions")
    text, pause, last = "", 0.0, time.monotonic()
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for event in events_of(answer):
            now = time.monotonic()
            pause, last = max(pause, now - last), now
            if "done" in event:
                return text, pause
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            if enough(text):
                return text, pause
    raise AssertionError("the stream was cut")


@pytest.mark.slow
def test_a_restart_of_all_engines_under_load_fails_no_request_and_breaks_no_text(
    tmp_path: Path,
) -> None:
    from tests.tiny_models import make_tiny

    model = make_tiny("llama", tmp_path / "model", max_position_embeddings=2 * LONG)
    file = tmp_path / "server.toml"
    file.write_text(
        f'drain_timeout_s = 2\nnum_blocks = 4096\n[[model]]\nid = "m"\npath = "{model}"\n'
        "engines = 2\nkv_bits = 16\ntemperature = 0.5\n"
    )
    with serving(None, "--config", str(file)) as server, ThreadPoolExecutor(3) as pool:
        server.wait_until(lambda: len(ready_engines(server)) == 2, PATIENCE_S, "both are ready")
        stop = Event()

        def load(number: int) -> list[str]:
            texts = []
            while not stop.is_set():
                texts.append(stream(server, f"short {number}", 60)[0])
            return texts

        short = [pool.submit(load, number) for number in range(2)]
        # Sampled: a greedy text of a random model may end in tokens that have no text.
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": 1}
        long = pool.submit(stream, server, "long", LONG, lambda text: stop.is_set(), **sampled)
        file.write_text(file.read_text().replace("temperature = 0.5", "temperature = 0.6"))
        server.process.send_signal(signal.SIGHUP)
        try:
            server.wait_until(
                lambda: sum("was replaced with" in line for line in server.log) == 2,
                PATIENCE_S,
                "both are exchanged",
            )
        finally:
            stop.set()
        oracle = Oracle(model)
        for number, future in enumerate(short):
            for text in set(future.result(PATIENCE_S)):
                check(oracle, f"short {number}", 60, text)
        text = long.result(PATIENCE_S)[0]
        again, _ = stream(server, "long", LONG, lambda again: len(again) >= len(text), **sampled)
        assert again[: len(text)] == text
        assert server.metric(RESUMED) > 0
        assert not [line for line in server.log if "Traceback" in line]


def check(oracle: Oracle, prompt: str, tokens: int, text: str) -> None:
    oracle.check(oracle.tokenizer.encode(prompt), tokens, text)


def ready_engines(server: Server) -> set[str]:
    (model,) = server.client.get("/health").json()["models"]
    return {engine["name"] for engine in model["engines"] if engine["ready"]}


@pytest.mark.slow
def test_a_killed_engine_pauses_its_streams_shortly_where_there_is_a_second_one(
    tiny_model: Callable[..., Path],
) -> None:
    """The supervisor tells the router at once; it does not wait for missing heartbeats."""
    with serving(tiny_model("llama"), "--engines", "2") as server, ThreadPoolExecutor(6) as pool:
        server.wait_until(lambda: len(ready_engines(server)) == 2, PATIENCE_S, "both are ready")
        # Sampled: a greedy text of a random model may end in tokens that have no text.
        sampled: dict[str, Any] = {"temperature": 1.0, "seed": 1}
        streams = [pool.submit(stream, server, f"p {n}", 1500, **sampled) for n in range(6)]
        server.wait_until(lambda: server.sequences_in_flight() == 6, PATIENCE_S, "all run")
        os.kill(server.pids("services.processes.engine")[0], signal.SIGKILL)
        pauses = [future.result(PATIENCE_S)[1] for future in streams]
        assert server.metric(RESUMED) >= 1
        assert any("is lost: ended" in line for line in server.log), "not by missing beats"
        print(f"longest pause: {max(pauses):.2f} s")  # noqa: T201


@pytest.mark.slow
def test_a_machine_that_slept_is_forgiven(tiny_model: Callable[..., Path]) -> None:
    """All processes stand still for longer than any of them may be silent, stalled or late."""
    limits = ("--stall-timeout-s", "5", "--request-timeout-s", "5")
    with serving(tiny_model("llama"), *limits) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, server, "abc", 1900)
        server.wait_until(lambda: server.sequences_in_flight() == 1, PATIENCE_S, "it runs")
        pids = server.pids()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in (server.process.pid, *pids):
                os.kill(pid, number)
            time.sleep(12 if number == signal.SIGSTOP else 0)
        answer.result(PATIENCE_S)
        assert set(server.pids()) == set(pids), "none was killed"
        assert server.metric(RESUMED) == 0
        assert any("was suspended" in line for line in server.log)
