"""Commands at a server of another version, and with addresses and keys that cannot be sent."""

from __future__ import annotations

import io
import json
import shutil
import signal
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from services.commands import cli, control
from services.commands.bench import options
from services.commands.chat import command
from tests.stand_ins.http_server import answering

ANSWERS: dict[str, object] = {
    "/health": {
        "status": "ok",
        "version": "0.0.9",
        "reasons": [],
        "models": [{"id": "m", "engines": [{"name": "e"}]}],
    },
    "/admin/restart": {"done": "restarting"},
    "/admin/cache/clear": {"done": "cleared"},
    "/admin/engines": {"engines": [{"name": "e"}]},
    "/v1/files": {"id": "file-1"},
    "/v1/batches": {"id": "b"},
}
"""What a server with fewer fields sends."""


def answer(path: str, _: Message) -> tuple[int, bytes]:
    return 200, json.dumps(ANSWERS.get(path, [])).encode()


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """The URL of a server of another version."""
    with answering(answer) as url:
        yield url


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[list[str]]:
    """The words of a command that runs a batch."""
    before = signal.getsignal(signal.SIGTERM)
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "1", "url": "/v1/completions"}\n')
    yield ["batch", str(source), str(tmp_path / "out.jsonl")]
    signal.signal(signal.SIGTERM, before)


def line(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Return the one line that a command writes, after a check of its exit code."""
    assert cli.main(words) == code
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    "words", [["status"], ["restart"], ["engines"], ["cache", "clear"], ["batch"]], ids=" ".join
)
def test_a_server_of_another_version_is_one_line(
    words: list[str], other: str, batch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = line(capsys, 3, *(batch if words == ["batch"] else words), f"--url={other}")
    assert "the server has another version" in said


def test_a_batch_needs_a_server_that_sends_objects(
    batch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(lambda path, headers: (200, b"<html>")) as url:
        assert "is not an mlx-lm-server" in line(capsys, 3, *batch, f"--url={url}")


@pytest.mark.parametrize(
    "words",
    [["chat", "hi"], ["chat", "hi", "--model=m"], ["batch"], ["engines"], ["agent", "claude"]],
    ids=" ".join,
)
def test_a_key_that_no_header_carries_is_one_line(
    words: list[str],
    other: str,
    batch: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(shutil, "which", str)
    for name in ("MLX_LM_SERVER_API_KEY", "MLX_LM_SERVER_ADMIN_KEY"):
        monkeypatch.setenv(name, "schlüssel→")
    said = line(capsys, 1, *(batch if words == ["batch"] else words), f"--url={other}")
    assert "characters that a header cannot carry" in said


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1/é", f"http://{70 * 'é'}"], ids=["IP", "path", "name"]
)
def test_an_address_that_cannot_be_sent_is_one_line(
    url: str,
    batch: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    for words in (["chat", "hi", "--model=m"], batch):
        assert url in line(capsys, 3, *words, f"--url={url}")


def test_an_empty_variable_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_LM_SERVER_URL", "")
    for parser in (control.status_parser(), command.parser(), options.make_parser()):
        assert parser.parse_args([]).url == "http://127.0.0.1:8000"
