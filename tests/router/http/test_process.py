"""The router as a process: start, drain, end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.exits import EXIT_CONFIG
from shared.supervisor_link import LINK_VARIABLE
from tests.router.conftest import ROOT, Server, StartServer, error_of, eventually


def test_a_drain_finishes_running_requests_and_refuses_new_ones(start_server: StartServer) -> None:
    server = start_server("--drain-timeout-s=20")
    engine = server.join("hello world", hold_tokens_after=1)
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(server.chat, "x", stream=True)
        whole = pool.submit(server.chat, "x")
        eventually(lambda: len(engine.running) == 2)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.client.get("/readyz").status_code == 503)
        assert server.client.get("/health").json()["status"] == "shutting_down"
        refused = server.chat("x")
        assert error_of(refused, 503)["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        engine.behaviour.hold_tokens_after = None
        assert "[DONE]" in streamed.result(60).text
        assert whole.result(60).status_code == 200
    assert server.process.wait(60) == 0


def test_a_drain_that_takes_too_long_ends_streams_with_an_error_event(
    start_server: StartServer,
) -> None:
    server = start_server("--drain-timeout-s=0.5")
    server.join("hello world", hold_tokens_after=1)
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(server.chat, "x", stream=True)
        whole = pool.submit(server.chat, "x")
        eventually(lambda: server.num_tokens == 2)
        server.process.send_signal(signal.SIGTERM)
        last = streamed.result(60).text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert whole.result(60).status_code == 503
    assert server.process.wait(60) == 0


def test_a_second_signal_ends_the_process_at_once(start_server: StartServer) -> None:
    server = start_server("--drain-timeout-s=60")
    engine = server.join("hello world", hold_tokens_after=1)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.chat, "x")
        eventually(lambda: len(engine.running) == 1)
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert server.process.wait(60) == 0
        assert answer.exception(60) is not None or answer.result().status_code == 503


def test_a_stopped_router_leaves_only_its_lock_file(start_server: StartServer) -> None:
    server = start_server()
    server.join()
    directory = Path(server.address.removeprefix("ipc://")).parent
    assert len(list(directory.iterdir())) > 1
    assert server.stop() == 0
    assert [path.name for path in directory.iterdir()] == ["engines.lock"]


def test_a_restarted_router_finds_its_engines_again(start_server: StartServer) -> None:
    server = start_server()
    engine = server.join("hi", max_sequences=3)
    server.process.kill()
    server.process.wait()
    again = Server(
        Path(server.address.removeprefix("ipc://")).parent,
        server.log.with_suffix(".2"),
        server.model_dir,
    )
    try:
        again.wait_ready()
        assert again.chat("x").status_code == 200
        assert engine.hello.max_sequences == 3
    finally:
        again.stop()


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.processes.router", "--host=127.0.0.1", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_processes_can_meet_at_an_ipv6_address(start_server: StartServer, free_port: int) -> None:
    address = f"tcp://[::1]:{free_port}"
    server = start_server(f"--engine-socket={address}")
    server.address = address
    server.join("hi")
    assert server.chat("x").status_code == 200
    assert server.log.read_text().count("can join --engine-socket as an engine") == 1


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(f"--port={port}", f"--engine-socket=ipc://{tmp_path}/e")
    assert result.returncode == EXIT_CONFIG
    assert len(result.stderr.splitlines()) == 1
    assert str(port) in result.stderr


def test_unusable_keys_are_reported_in_one_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret rpm=many\n")
    result = run("--port=0", f"--engine-socket=ipc://{tmp_path}/e", f"--api-key-file={keys}")
    assert result.returncode == EXIT_CONFIG
    assert len(result.stderr.splitlines()) == 1
    assert "line 1: Expected `int" in result.stderr and "secret" not in result.stderr


def test_an_engine_socket_in_use_is_reported_in_one_line(start_server: StartServer) -> None:
    server = start_server()
    result = run("--port=0", f"--engine-socket={server.address}")
    assert result.returncode == EXIT_CONFIG
    assert len(result.stderr.splitlines()) == 1
    assert "--engine-socket" in result.stderr
    assert server.client.get("/livez").status_code == 200


def test_a_router_serves_its_supervisors_socket_once_told_of_models_and_ends_with_the_link(
    tmp_path: Path,
) -> None:
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    environment = {
        **os.environ,
        LINK_VARIABLE: str(theirs.fileno()),
        "_MLX_LM_SERVER_HTTP_FD": str(listener.fileno()),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.processes.router", f"--engine-socket=ipc://{tmp_path}/e"],
        cwd=ROOT,
        env=environment,
        pass_fds=(theirs.fileno(), listener.fileno()),
    )
    theirs.close()
    try:
        ours.settimeout(30)
        first = json.loads(ours.makefile().readline())
        assert first["phase"] == "loading"
        with socket.create_connection(listener.getsockname(), timeout=30) as connection:
            body = b'{"prompt": "x"}'
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body)
            )
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
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_long_chat_template_is_not_taken_for_a_path(start_server: StartServer) -> None:
    template = (
        "{# " + "long " * 100 + "#}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    server = start_server(f"--chat-template={template}")
    server.join()
    assert server.chat("hello").status_code == 200


def test_a_server_that_is_told_to_stop_serves_on_while_load_balancers_go_elsewhere(
    start_server: StartServer,
) -> None:
    server = start_server("--pre-stop-delay-s=600")
    server.join("hi")
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: server.client.get("/readyz").status_code == 503)
    assert server.client.get("/health").json()["status"] == "shutting_down"
    assert server.chat("x").status_code == 200
    server.process.send_signal(signal.SIGTERM)  # the second one: at once
    assert server.process.wait(30) == 0
