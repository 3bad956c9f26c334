"""Processes that are killed or stopped under load, and clients that disconnect."""

from __future__ import annotations

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.process import wait_until
from tests.e2e.server import (
    CHECKED,
    RESUMED,
    Server,
    descendants,
    llama_server,
    ps,
    text_of,
    wait_ended,
)

PATIENCE_S = 60.0
"""Generous, for a loaded machine: on a quiet one a killed process is replaced within 15 s."""

server = llama_server(**CHECKED)


def wait_recovered(server: Server, gone: int) -> None:
    """Wait until ``gone`` has ended and the server is ready again."""
    server.wait_until(lambda: gone not in server.pids() and server.is_ready(), PATIENCE_S, "ready")


def test_streams_resume_after_an_engine_is_killed_and_new_requests_wait(server: Server) -> None:
    """Greedy and sampled streams, with penalties, several at once."""
    sampled = {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.2}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("abc", {}),
        ("abc abc", sampled),
        ("hello", sampled),
    ]
    running = [server.stream(prompt, 400, **fields) for prompt, fields in asked]
    before = [[next(events) for _ in range(3)] for events in running]
    resumed = server.metric(RESUMED)
    pid = server.kill("engine")
    with ThreadPoolExecutor(len(running) + 1) as pool:
        rests = [pool.submit(list, events) for events in running]
        server.wait_until(lambda: not server.is_ready(), PATIENCE_S, "not ready")
        new = pool.submit(server.complete, "abc", 4)
        rest: list[list[dict[str, Any]]] = [each.result() for each in rests]
        assert new.result()["usage"]["completion_tokens"] == 4
    wait_recovered(server, pid)
    assert server.metric(RESUMED) == resumed + len(asked)
    for (prompt, fields), first, later in zip(asked, before, rest, strict=True):
        text = text_of(first + later)
        expected = server.complete(prompt, 400, **{"ignore_eos": True, **fields})
        assert expected["usage"]["completion_tokens"] == 400
        assert text == expected["choices"][0]["text"]


def test_a_stopped_engine_is_replaced_and_requests_that_it_did_not_take_go_on(
    server: Server,
) -> None:
    expected = server.text("hello there", 8, ignore_eos=True)
    pid = server.kill("engine", signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.text, "hello there", 8, ignore_eos=True) for _ in range(4)]
        server.wait_until(lambda: server.sequences_in_flight() == 4, PATIENCE_S, "placed")
        server.wait_until(lambda: not server.is_ready(), PATIENCE_S, "not ready")
        texts = [future.result() for future in waiting]
    assert texts == [expected] * 4
    wait_recovered(server, pid)


def test_a_killed_kvstore_does_not_disturb_streams(server: Server) -> None:
    running = server.stream("abc", 600)
    next(running)
    pid = server.kill("kvstore")
    events = list(running)
    assert events[-1] == {"done": True}
    wait_recovered(server, pid)
    assert server.complete("abc", 4)["usage"]["completion_tokens"] == 4


def test_a_killed_router_is_replaced_and_the_engine_drops_its_requests(server: Server) -> None:
    running = server.stream("abc", 1500)
    next(running)
    pid = server.kill("router")
    with pytest.raises(httpx.HTTPError):
        list(running)
    wait_recovered(server, pid)
    assert server.complete("abc", 4)["usage"]["completion_tokens"] == 4
    server.wait_until(lambda: server.metric("active_sequences") == 0, PATIENCE_S, "engine idle")


def test_a_router_that_is_replaced_finishes_its_streams_and_leaves_connections(
    server: Server,
) -> None:
    expected = server.complete("abc", 4)
    running = server.stream("abc", 400)
    events = [next(running)]
    (old,) = server.pids("services.processes.router")

    def ask(_: int) -> httpx.Response:
        """Ask on a connection of its own."""
        body = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

    os.kill(old, signal.SIGTERM)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask, range(16))
        events += running
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == expected["choices"]
    assert events[-1] == {"done": True}
    assert not any("error" in event for event in events)
    wait_recovered(server, old)


spared = llama_server("--spare-engine-after-s", "0.1", TEST_FORKS="0")
"""A server with a spare process. The last test kills it."""


def spares(server: Server) -> list[int]:
    return server.pids("services.processes.engine_spare")


def test_a_spare_process_takes_the_place_of_a_killed_engine(spared: Server) -> None:
    spared.wait_until(lambda: bool(spares(spared)), PATIENCE_S, "a spare process")
    (spare,) = spares(spared)
    (engine,) = set(spared.pids("services.processes.engine")) - {spare}
    expected = spared.text("abc", 300, ignore_eos=True)
    events = spared.stream("abc", 300)
    first = [next(events) for _ in range(3)]
    os.kill(engine, signal.SIGKILL)
    assert text_of(first + list(events)) == expected
    assert spare in spared.pids() and engine not in spared.pids()


def test_a_killed_supervisor_leaves_nothing_behind(spared: Server) -> None:
    private = Path(environment(spared.process.pid, "XDG_RUNTIME_DIR"))
    spared.wait_until(lambda: bool(spares(spared)), PATIENCE_S, "a spare process")
    children = spared.pids()
    spared.process.kill()
    spared.process.wait()
    wait_ended(children, PATIENCE_S)
    wait_until(lambda: not any(path.is_socket() for path in private.rglob("*")))


def environment(pid: int, name: str) -> str:
    """Return the value of an environment variable of a process."""
    words = ps("eww", "-p", str(pid), "-o", "args=").split()
    return next(word for word in words if word.startswith(f"{name}=")).partition("=")[2]


def test_a_client_that_disconnects_frees_its_sequences(server: Server) -> None:
    many = {"prompt": ["abc"] * 64, "max_tokens": 1900, "ignore_eos": True}
    body = json.dumps(many).encode()
    for streaming in (b"", b'"stream": true, '):
        aborts = server.metric("mlx_lm_server_aborts_total")
        payload = b"{" + streaming + body[1:]
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(payload) + payload
            )
            server.wait_until(lambda: server.metric("active_sequences") > 0, PATIENCE_S, "running")
        server.wait_until(lambda: server.metric("active_sequences") == 0, PATIENCE_S, "freed")
        assert server.metric("mlx_lm_server_aborts_total") > aborts, "nothing was aborted"


def test_sigterm_lets_running_requests_finish(server: Server) -> None:
    """Stands last: the server ends."""
    running = server.stream("abc", 400)
    events = [next(running)]
    server.process.send_signal(signal.SIGTERM)
    events += running
    assert events[-1] == {"done": True}
    assert not any("error" in event for event in events)
    assert server.process.wait(PATIENCE_S) == 0
    assert descendants(server.process.pid) == []
