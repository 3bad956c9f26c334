"""Processes that are killed or stopped under load; clients that go away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, alive, descendants, serving
from tests.oracle import Oracle

READY_AGAIN_S = 15.0
"""What is promised on a quiet machine; a test bound has to be generous."""
PATIENCE_S = 60.0


@pytest.fixture
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    with serving(tiny_model("llama"), _MLX_LM_SERVER_CHECK_INTEGRITY="1") as running:
        yield running


def stream(server: Server, prompt: str, max_tokens: int, **fields: Any) -> Iterator[dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    body |= {"ignore_eos": True, **fields}
    with server.client.stream("POST", "/v1/completions", json=body) as r:
        r.raise_for_status()
        for line in r.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])
            elif line == "data: [DONE]":
                yield {"done": True}


def kill(server: Server, name: str, number: int = signal.SIGKILL) -> int:
    (pid,) = server.pids(f"services.{name}")
    os.kill(pid, number)
    return pid


def wait_back(server: Server, gone: int) -> None:
    """Ready again, and not just not yet noticed that ``gone`` is gone."""
    server.wait_until(lambda: gone not in server.pids() and server.is_ready(), PATIENCE_S, "ready")


def text_of(events: list[dict[str, Any]]) -> str:
    assert events[-1] == {"done": True}, events[-1]
    return "".join(event["choices"][0]["text"] for event in events[:-1])


def test_killed_engine_streams_go_on_where_they_were(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    """Greedy and drawn ones, with penalties, and several choices at once."""
    drawn = {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.2}
    asked: list[tuple[str, dict[str, Any]]] = [("abc", {}), ("abc abc", drawn), ("hello", drawn)]
    begun = [stream(server, prompt, 400, **fields) for prompt, fields in asked]
    heard = [[next(events) for _ in range(3)] for events in begun]
    pid = kill(server, "engine")
    with ThreadPoolExecutor(len(begun)) as pool:
        rest: list[list[dict[str, Any]]] = list(pool.map(list, begun))
    wait_back(server, pid)
    assert server.metric("mlx_lm_server_resumed_requests_total") == len(asked)
    oracle = Oracle(tiny_model("llama"))
    for (prompt, fields), first, later in zip(asked, heard, rest, strict=True):
        text = text_of(first + later)
        undisturbed = server.complete(prompt, 400, **{"ignore_eos": True, **fields})
        assert undisturbed["usage"]["completion_tokens"] == 400
        if text != undisturbed["choices"][0]["text"]:
            assert not fields, "a drawn text differs"
            oracle.check(oracle.tokenizer.encode(prompt), 400, text)


def test_a_stream_that_has_lost_two_engines_ends_with_an_error(server: Server) -> None:
    begun = stream(server, "abc", 1900)
    next(begun)
    pid = kill(server, "engine")

    def resumed() -> bool:
        if not server.metric("mlx_lm_server_resumed_requests_total"):
            return False
        engines = server.client.get("/health").json()["models"][0]["engines"]
        return [engine["sequences"] for engine in engines if engine["ready"]] == [1]

    server.wait_until(resumed, PATIENCE_S, "resumed")
    pid = kill(server, "engine")
    events = list(begun)
    assert events[-1]["error"]["code"] == "engine_lost"
    assert sum("error" in event for event in events) == 1
    wait_back(server, pid)
    assert server.complete("abc", 4)["usage"]["completion_tokens"] == 4


def test_killed_engine_waiting_requests_are_submitted_once_more(server: Server) -> None:
    expected = server.complete("hello there", 8, ignore_eos=True)["choices"][0]["text"]
    (engine,) = server.pids("services.engine")
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(server.complete, "hello there", 8, ignore_eos=True) for _ in range(4)
        ]
        time.sleep(0.5)
        os.kill(engine, signal.SIGKILL)
        texts = [future.result()["choices"][0]["text"] for future in waiting]
    assert texts == [expected] * 4


def test_a_stopped_engine_is_noticed_and_replaced(server: Server) -> None:
    pid = kill(server, "engine", signal.SIGSTOP)
    server.wait_until(lambda: not server.is_ready(), PATIENCE_S, "/readyz tells")
    wait_back(server, pid)
    assert server.complete("abc", 4)["usage"]["completion_tokens"] == 4


def test_a_killed_kvstore_disturbs_nobody(server: Server) -> None:
    begun = stream(server, "abc", 600)
    next(begun)
    pid = kill(server, "kvstore")
    events = list(begun)
    assert events[-1] == {"done": True}
    wait_back(server, pid)
    assert server.complete("abc", 4)["usage"]["completion_tokens"] == 4


def test_a_killed_router_comes_back_and_the_engine_forgets_its_requests(server: Server) -> None:
    begun = stream(server, "abc", 1500)
    next(begun)
    pid = kill(server, "router")
    with pytest.raises(httpx.HTTPError):
        list(begun)
    wait_back(server, pid)
    assert server.complete("abc", 4)["usage"]["completion_tokens"] == 4
    server.wait_until(lambda: server.metric("active_sequences") == 0, PATIENCE_S, "idle")


def test_a_killed_supervisor_leaves_nothing_behind(tiny_model: Callable[..., Path]) -> None:
    with serving(tiny_model("llama")) as server:
        private = Path(next(iter(environment(server.process.pid, "XDG_RUNTIME_DIR"))))
        children = server.pids()
        assert len(children) == 3
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + PATIENCE_S
        while any(map(alive, children)) or left_sockets(private):
            assert time.monotonic() < deadline, (children, left_sockets(private))
            time.sleep(0.1)


def environment(pid: int, name: str) -> Iterator[str]:
    shown = subprocess.run(
        ["ps", "eww", "-p", str(pid), "-o", "args="], capture_output=True, text=True, check=True
    ).stdout
    for word in shown.split():
        if word.startswith(f"{name}="):
            yield word.partition("=")[2]


def left_sockets(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_socket()]


def test_a_client_that_goes_away_frees_its_sequences(server: Server) -> None:
    many = {"prompt": ["abc"] * 64, "max_tokens": 1900, "ignore_eos": True}
    body = json.dumps(many).encode()
    for number, streaming in enumerate((b"", b'"stream": true, ')):
        payload = b"{" + streaming + body[1:]
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(payload) + payload
            )
            server.wait_until(lambda: server.metric("active_sequences") > 0, PATIENCE_S, "running")
        server.wait_until(lambda: server.metric("active_sequences") == 0, PATIENCE_S, "freed")
        aborts = server.metric("mlx_lm_server_aborts_total")
        assert aborts > number, "they ran to their end"


def test_sigterm_lets_running_requests_finish(tiny_model: Callable[..., Path]) -> None:
    with serving(tiny_model("llama")) as server:
        running = stream(server, "abc", 400)
        events = [next(running)]
        server.process.send_signal(signal.SIGTERM)
        events += running
        assert events[-1] == {"done": True}
        assert not any("error" in event for event in events)
        assert server.process.wait(PATIENCE_S) == 0
        assert descendants(server.process.pid) == []


def test_requests_that_come_while_the_engine_restarts_wait_for_it(server: Server) -> None:
    kill(server, "engine")
    time.sleep(0.2)
    assert server.complete("abc", 4)["usage"]["completion_tokens"] == 4
