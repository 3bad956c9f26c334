"""The router as a process: start, drain, end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from shared.exits import EXIT_CONFIG
from shared.supervisor_link import LINK_VARIABLE
from tests.router.conftest import ROOT, Server, StartServer, error_of, eventually, key_flag
from tests.router.router_process import RouterProcess


def terminate(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)


def test_a_drain_finishes_running_requests_and_refuses_new_ones(start_server: StartServer) -> None:
    server = start_server("--drain-timeout-s=20")
    engine = server.join("hello world", hold_tokens_after=1)
    streamed, whole = (server.begin("x", stream=stream) for stream in (True, False))
    eventually(lambda: len(engine.running) == 2)
    terminate(server)
    server.wait_unready()
    assert server.client.get("/health").json()["status"] == "shutting_down"
    refused = server.chat("x")
    assert error_of(refused, 503)["code"] == "shutting_down"
    assert "retry-after" in refused.headers
    engine.behaviour.hold_tokens_after = None
    assert "[DONE]" in streamed.result(60).text
    assert whole.result(60).status_code == 200
    assert server.process.wait(60) == 0


def test_a_drain_that_takes_too_long_ends_streams_with_an_error(start_server: StartServer) -> None:
    server = start_server("--drain-timeout-s=0.5")
    server.join("hello world", hold_tokens_after=1)
    streamed, whole = (server.begin("x", stream=stream) for stream in (True, False))
    server.wait_tokens(2)
    terminate(server)
    last = streamed.result(60).text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert whole.result(60).status_code == 503
    assert server.process.wait(60) == 0


def test_a_stopped_router_leaves_only_its_lock_file(start_server: StartServer) -> None:
    server = start_server()
    server.join()
    directory = Path(server.address.removeprefix("ipc://")).parent
    assert len(list(directory.iterdir())) > 1
    assert server.stop() == 0
    assert [path.name for path in directory.iterdir()] == ["engines.lock"]


def test_a_restarted_router_finds_its_engines_again(start_server: StartServer) -> None:
    server = start_server()
    server.join("hi", max_sequences=3)
    server.process.kill()
    server.process.wait()
    directory = Path(server.address.removeprefix("ipc://")).parent
    again = Server(directory, server.log.with_suffix(".2"), server.model_dir)
    try:
        again.wait_ready()
        assert again.chat("x").status_code == 200
    finally:
        again.stop()


def refusal(log: Path, *flags: str) -> str:
    """Return the one line with which a router does not start."""
    code, line = RouterProcess(["--host=127.0.0.1", *flags], log).wait(60), log.read_text()
    assert (code, line.count("\n")) == (EXIT_CONFIG, 1), line
    return line


def test_processes_can_meet_at_an_ipv6_address(start_server: StartServer, free_port: int) -> None:
    address = f"tcp://[::1]:{free_port}"
    server = start_server(f"--engine-socket={address}")
    server.address = address
    server.join("hi")
    assert server.chat("x").status_code == 200
    assert server.log.read_text().count("can join --engine-socket as an engine") == 1


def test_what_is_in_use_or_unusable_is_one_line(start_server: StartServer, tmp_path: Path) -> None:
    own, log = f"--engine-socket=ipc://{tmp_path}/e", tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in refusal(log, f"--port={port}", own)
    line = refusal(log, "--port=0", own, key_flag(tmp_path, "secret rpm=many"))
    assert "line 1: Expected `int" in line and "secret" not in line
    (tmp_path / "notes").write_text("mine")
    notes = f"ipc://{tmp_path}/notes"
    assert f"{notes}: it exists, and is not" in refusal(log, "--port=0", f"--engine-socket={notes}")
    assert (tmp_path / "notes").read_text() == "mine"
    server = start_server()
    assert "--engine-socket" in refusal(log, "--port=0", f"--engine-socket={server.address}")
    assert server.client.get("/livez").status_code == 200


POST = b"""POST /v1/completions HTTP/1.1\r
host: x\r
connection: close\r
content-type: application/json\r
content-length: 15\r
\r
{"prompt": "x"}"""


def test_a_supervised_router_serves_when_told_of_models_and_ends_with_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    link = {LINK_VARIABLE: str(theirs.fileno()), "_MLX_LM_SERVER_HTTP_FD": str(listener.fileno())}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.processes.router", f"--engine-socket=ipc://{tmp_path}/e"],
        cwd=ROOT,
        env={**os.environ, **link},
        pass_fds=(theirs.fileno(), listener.fileno()),
    )
    theirs.close()
    try:
        ours.settimeout(30)
        first = json.loads(ours.makefile().readline())
        assert first["phase"] == "loading"
        with socket.create_connection(listener.getsockname(), timeout=30) as connection:
            connection.sendall(POST)
            time.sleep(1)  # nobody has joined, but that is no answer yet
            broken = {"names": ["m"], "state": "broken", "reason": "as it is"}
            ours.sendall(json.dumps({"models": {"m": broken}}).encode() + b"\n")
            answer = connection.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 503") and b"as it is" in answer
        ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        process.wait(60)
    finally:
        listener.close()
        process.kill()
        process.wait()


def test_a_long_chat_template_is_not_taken_for_a_path(start_server: StartServer) -> None:
    content = "{% for message in messages %}{{ message.content }}{% endfor %}"
    server = start_server(f"--chat-template={{# {'long ' * 100} #}}{content}")
    server.join()
    assert server.chat("hello").status_code == 200


def test_a_stopping_server_serves_on_until_load_balancers_leave_or_a_second_signal_comes(
    start_server: StartServer,
) -> None:
    server = start_server("--pre-stop-delay-s=600")
    engine = server.join("hi")
    terminate(server)
    server.wait_unready()
    assert server.client.get("/health").json()["status"] == "shutting_down"
    assert server.chat("x").status_code == 200
    engine.behaviour.hold_tokens_after = 1
    answer = server.begin("x")
    eventually(lambda: len(engine.running) == 1)
    terminate(server)
    assert server.process.wait(60) == 0
    assert answer.exception(60) is not None or answer.result().status_code == 503
