"""Engines that are exchanged under load: nothing fails, and no text is broken."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import httpx
import pytest

from tests.e2e.server import RESUMED, Server, pieces, serving
from tests.oracle import Oracle
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
LONG = 30_000
"""Tokens of a stream that nobody awaits the end of."""
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 1}
"""A greedy text of a random model may end in tokens that have no text."""


class TwoEngines(NamedTuple):
    server: Server
    model: Path
    file: Path


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEngines]:
    folder = tmp_path_factory.mktemp("two")
    model = make_tiny("llama", folder / "model", max_position_embeddings=2 * LONG)
    file = folder / "server.toml"
    file.write_text(
        f'drain_timeout_s = 2\nnum_blocks = 4096\n[[model]]\nid = "m"\npath = "{model}"\n'
        "engines = 2\nkv_bits = 16\ntemperature = 0.5\n"
    )
    with serving(None, "--config", str(file)) as server:
        server.wait_until(lambda: len(server.ready_engines()) == 2, PATIENCE_S, "both are ready")
        yield TwoEngines(server, model, file)


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
    text, pause, last = "", 0.0, time.monotonic()
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for piece in pieces(client, **body):
            now = time.monotonic()
            pause, last = max(pause, now - last), now
            text += piece
            if enough(text):
                break
    return text, max(pause, time.monotonic() - last)


def test_a_restart_of_all_engines_under_load_fails_no_request_and_breaks_no_text(
    two_engines: TwoEngines,
) -> None:
    server, model, file = two_engines
    with ThreadPoolExecutor(3) as pool:
        stop = Event()

        def load(number: int) -> list[str]:
            texts = []
            while not stop.is_set():
                texts.append(stream(server, f"short {number}", 60)[0])
            return texts

        short = [pool.submit(load, number) for number in range(2)]
        long = pool.submit(stream, server, "long", LONG, lambda text: stop.is_set(), **SAMPLED)
        file.write_text(file.read_text().replace("temperature = 0.5", "temperature = 0.6"))
        server.process.send_signal(signal.SIGHUP)
        try:
            server.wait_until(
                lambda: sum("was replaced with" in line for line in server.log) == 2, PATIENCE_S
            )
        finally:
            stop.set()
        oracle = Oracle(model)
        for number, future in enumerate(short):
            prompt = oracle.tokenizer.encode(f"short {number}")
            for text in set(future.result(PATIENCE_S)):
                oracle.check(prompt, 60, text)
        text = long.result(PATIENCE_S)[0]
        again, _ = stream(server, "long", LONG, lambda again: len(again) >= len(text), **SAMPLED)
        assert again[: len(text)] == text
        assert server.metric(RESUMED) > 0
        assert not [line for line in server.log if "Traceback" in line]


def test_a_killed_engine_pauses_its_streams_shortly_where_there_is_a_second_one(
    two_engines: TwoEngines,
) -> None:
    """The supervisor tells the router at once; it does not wait for missing heartbeats."""
    server = two_engines.server
    server.wait_until(lambda: len(server.pids("services.processes.engine")) == 2)
    resumed, logged = server.metric(RESUMED), len(server.log)
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(stream, server, f"p {n}", 1500, **SAMPLED) for n in range(6)]
        server.wait_until(lambda: server.sequences_in_flight() == 6, PATIENCE_S, "all run")
        os.kill(server.pids("services.processes.engine")[0], signal.SIGKILL)
        pauses = [future.result(PATIENCE_S)[1] for future in streams]
        assert server.metric(RESUMED) > resumed
        assert any("is lost: ended" in line for line in server.log[logged:]), "not by beats"
        print(f"longest pause: {max(pauses):.2f} s")  # noqa: T201


def test_time_while_suspended_does_not_count(
    tiny_model: Callable[..., Path],
) -> None:
    """Suspended as by Ctrl-Z, for longer than any of them may be silent, stalled or late."""
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
