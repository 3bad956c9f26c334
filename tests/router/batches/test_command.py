"""`mlx-lm-server batch` beside a real router."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.commands.admin_client import NoServer
from services.commands.batch.client import BatchApi
from services.commands.event_stream import StreamRefused
from tests.router.batches.conftest import BatchClient, line
from tests.router.conftest import ROOT, Server, StartServer, begin, eventually
from tests.router.scripted_engine import ScriptedEngine


def command(server: Server, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "mlx_lm_server", "batch", *map(str, arguments)]
    words.append(f"--url={server.url}")
    env = {k: v for k, v in os.environ.items() if not k.startswith("MLX_LM_SERVER_")}
    return subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def end(run: subprocess.Popen[str], code: int) -> str:
    """Return what a command wrote to stderr, after a check of its exit code."""
    _, said = run.communicate(timeout=60)
    assert run.returncode == code, said
    return said


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]


def test_a_file_is_answered(
    server: Server, engine: ScriptedEngine, tmp_path: Path, batches: BatchClient
) -> None:
    source = written(tmp_path / "in.jsonl", line("a"), line("b", max_tokens="x"), line("c"))
    target = tmp_path / "out.jsonl"
    kept = len(batches.api.files.list().data)
    said = end(command(server, source, target), 1)
    assert "completed: 2 of 3 lines succeeded, 1 failed" in said
    assert ids(target) == ["a", "c"] and ids(tmp_path / "out.errors.jsonl") == ["b"]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("in.jsonl", "out.jsonl", "out.errors.jsonl")
    }
    assert len(batches.api.files.list().data) == kept  # none is left on the server
    end(command(server, source, target, "--force", "--in-order"), 1)
    assert ids(target) == ["a", "b", "c"]
    assert "--force" in end(command(server, source, target), 2)


def test_a_command_that_was_killed_follows_its_batch_again(
    server: Server, tmp_path: Path, batches: BatchClient
) -> None:
    engine = server.join("hello world", hold_tokens_after=1)
    source = written(tmp_path / "in.jsonl", *(line(f"r{number}") for number in range(9)))
    target = tmp_path / "out.jsonl"
    before = len(batches.api.batches.list(limit=100).data)
    run = command(server, source, target)
    eventually((tmp_path / "out.jsonl.batch" / "state.json").exists)
    os.kill(run.pid, signal.SIGKILL)
    end(run, -signal.SIGKILL)
    other = written(tmp_path / "other.jsonl", line("z"))
    assert "another input" in end(command(server, other, target), 1)
    engine.behaviour.hold_tokens_after = None
    end(command(server, source, target), 0)
    assert ids(target) == [f"r{number}" for number in range(9)]
    assert len(batches.api.batches.list(limit=100).data) == before + 1


def test_errors_are_one_line(server: Server, start_server: StartServer, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in.jsonl", line("a")), tmp_path / "out.jsonl"
    said = end(command(start_server(), source, target), 1)
    assert "--batch-dir" in said and "--serve" in said
    end(command(server, tmp_path / "none.jsonl", target), 2)
    for lines, words, expected in (
        ([], (), "is empty"),
        ([line("a"), line("a")], (), "line 2:"),
        ([line("a"), []], ("--force", "--in-order"), "line 2:"),
    ):
        said = end(command(server, written(source, *lines), target, *words), 1)
        assert expected in said and "Traceback" not in said
    assert not list(tmp_path.glob("*.batch"))


def test_an_error_is_read_though_the_server_waits_for_no_more_of_the_file(tmp_path: Path) -> None:
    large = tmp_path / "in.jsonl"
    large.write_bytes(bytes(8 * 2**20))
    body = b'{"error": {"message": "no files here"}}'
    head = b"HTTP/1.1 501 Not Implemented\r\nContent-Length: %d\r\n\r\n" % len(body)

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(head + body)
            connection.shutdown(socket.SHUT_RD)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answered = begin(answer, listener)
        api = BatchApi(f"http://127.0.0.1:{listener.getsockname()[1]}", "")
        with pytest.raises(StreamRefused, match="no files here"):
            api.upload(large)
        answered.result()
    with pytest.raises(NoServer, match="no server responds"):
        api.upload(large)
