"""`mlx-lm-server batch` beside a real router."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.commands import cli
from services.commands.admin_client import NoServer
from services.commands.batch.client import BatchApi
from services.commands.event_stream import StreamRefused
from tests.router.batches.conftest import BatchClient, line
from tests.router.conftest import ROOT, Server, StartServer, begin, eventually

Command = Callable[..., str]


@pytest.fixture
def command(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    """Return a function that runs a command in this process, and returns what it wrote to stderr,
    after a check of its exit code."""
    before = signal.getsignal(signal.SIGTERM)

    def run(code: int, *arguments: object, url: str = server.url) -> str:
        assert cli.main(["batch", *map(str, arguments), f"--url={url}"]) == code
        return capsys.readouterr().err

    monkeypatch.delenv("MLX_LM_SERVER_API_KEY", raising=False)
    yield run
    signal.signal(signal.SIGTERM, before)


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]


@pytest.mark.usefixtures("engine")
def test_a_file_is_answered(command: Command, tmp_path: Path, batches: BatchClient) -> None:
    source = written(tmp_path / "in.jsonl", line("a"), line("b", max_tokens="x"), line("c"))
    target = tmp_path / "out.jsonl"
    kept = len(batches.api.files.list().data)
    assert "completed: 2 of 3 lines succeeded, 1 failed" in command(1, source, target)
    assert ids(target) == ["a", "c"] and ids(tmp_path / "out.errors.jsonl") == ["b"]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("in.jsonl", "out.jsonl", "out.errors.jsonl")
    }
    assert len(batches.api.files.list().data) == kept  # none is left on the server
    command(1, source, target, "--force", "--in-order")
    assert ids(target) == ["a", "b", "c"]
    assert "--force" in command(2, source, target)


def test_a_command_that_was_killed_follows_its_batch_again(
    server: Server, command: Command, tmp_path: Path, batches: BatchClient
) -> None:
    engine = server.join("hello world", hold_tokens_after=1)
    source = written(tmp_path / "in.jsonl", *(line(f"r{number}") for number in range(9)))
    target = tmp_path / "out.jsonl"
    before = len(batches.api.batches.list(limit=100).data)
    words = ["-m", "mlx_lm_server", "batch", str(source), str(target), f"--url={server.url}"]
    with subprocess.Popen([sys.executable, *words], cwd=ROOT) as run:
        eventually((tmp_path / "out.jsonl.batch" / "state.json").exists)
        run.kill()
    other = written(tmp_path / "other.jsonl", line("z"))
    assert "another input" in command(1, other, target)
    engine.behaviour.hold_tokens_after = None
    command(0, source, target)
    assert ids(target) == [f"r{number}" for number in range(9)]
    assert len(batches.api.batches.list(limit=100).data) == before + 1


def test_errors_are_one_line(command: Command, start_server: StartServer, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in.jsonl", line("a")), tmp_path / "out.jsonl"
    said = command(1, source, target, url=start_server().url)
    assert "--batch-dir" in said and "--serve" in said
    command(2, tmp_path / "none.jsonl", target)
    for lines, words, expected in (
        ([], (), "is empty"),
        ([line("a"), line("a")], (), "line 2:"),
        ([line("a"), []], ("--force", "--in-order"), "line 2:"),
    ):
        said = command(1, written(source, *lines), target, *words)
        assert expected in said
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
