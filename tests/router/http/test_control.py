"""`mlx-lm-server status | engines | drain | restart | keys reload`, beside a running router."""

from __future__ import annotations

import json
import signal
import socket
from types import SimpleNamespace

import pytest

from services.commands import cli
from shared.wire import Drain
from tests.conftest import unused_port
from tests.router.conftest import Server, StartServer, begin, eventually
from tests.stand_ins.http_server import answering

FLAGS = ("--admin-key=boss", "--restart-wait-s=20")


class Command:
    """Runs the command line against a server."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self._capsys = url, capsys

    def __call__(self, *words: str, key: str = "boss", code: int = 0, url: str = "") -> str:
        """Return what it prints, after a check of its exit code."""
        flags = ["--url", url or self.url, *(["--admin-key", key] if words[0] != "status" else [])]
        assert cli.main([*words, *flags]) == code
        out, err = self._capsys.readouterr()
        assert not code or err.count("\n") <= 1, "one line"
        return out + err


@pytest.fixture
def command(server: Server, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(server.url, capsys)


def shown(text: str) -> list[list[str]]:
    """Return the first three words of each line."""
    return [line.split()[:3] for line in text.splitlines()]


def test_the_state_is_shown_and_decides_the_exit_code(server: Server, command: Command) -> None:
    assert "no engine has joined yet" in command("status", code=1)
    server.join("hello", name="shown")
    assert command("status").startswith("ok: mlx-lm-server")
    assert ["tiny", "shown", "ready"] in shown(command("status"))
    assert json.loads(command("status", "--json"))["status"] == "ok"
    assert "shown" in command("engines")
    assert json.loads(command("engines", "--json"))["engines"][0]["name"] == "shown"


def test_engines_are_drained_and_restarted(server: Server, command: Command) -> None:
    engine = server.start_engine("hello", name="kept")
    eventually(lambda: ["kept", "tiny", "ready"] in shown(command("engines")))
    assert command("drain", "kept", "--wait") == "kept: drained\n"
    assert "drained by an administrator" in command("engines")
    assert command("drain", "kept", "--undo") == "kept: drain undone\n"
    done = begin(command, "restart", "kept", "--wait")
    eventually(lambda: bool(engine.got(Drain)))
    engine.leave()
    server.start_engine("hello", name="kept")
    assert done.result(60) == "restarted: kept\n"


def test_errors_are_a_line_and_a_code(command: Command) -> None:
    assert "there is no engine 'x'" in command("drain", "x", code=1).lower()
    assert "The admin key is not valid. (set --admin-key" in command("engines", key="no", code=1)
    assert "--undo: requires an engine" in command("drain", "--undo", code=1)
    nobody = f"http://127.0.0.1:{unused_port()}"
    assert f"no server responds at {nobody}" in command("engines", code=3, url=nobody)
    with pytest.raises(SystemExit) as caught:
        cli.main(["restart", "--nonsense"])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "answer",
    ['200 {"status": "ok"}', "200 true", '404 {"detail": "Not Found"}', "404 []", "200 {}", "500"],
)
def test_another_program_is_one_line(answer: str, command: Command) -> None:
    status, _, body = answer.partition(" ")
    with answering(lambda path, headers: (int(status), body.encode())) as url:
        for name in ("status", "engines", "drain", "restart"):
            assert command(name, code=3, url=url).endswith("but is not an mlx-lm-server\n")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1", "must begin with http://"),
        *((url, url) for url in ("http://a b", "http://[::1", "http://127.0.0.1:x")),
    ],
)
def test_a_bad_address_is_said_in_one_line(url: str, said: str, command: Command) -> None:
    assert said in command("status", code=3, url=url)


def test_a_server_without_http_is_said_in_one_line(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")
                connection.recv(4096)

        spoken = begin(speak)
        assert command("status", code=3, url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        spoken.result(60)


def test_an_interrupted_wait_is_silent(
    server: Server, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start_engine("hello", name="busy")
    eventually(lambda: ["busy", "tiny", "ready"] in shown(command("engines")))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("services.commands.control.time", SimpleNamespace(sleep=interrupt))
    assert command("restart", "busy", "--wait", code=128 + signal.SIGINT) == ""


def test_keys_are_reloaded_and_caches_cleared(command: Command) -> None:
    assert command("keys", "reload").split() == ["API", "keys", "0"]
    assert command("cache", "clear").startswith("cleared (all): ")
    assert "only be cleared completely" in command("cache", "clear", "--namespace=x", code=1)


def test_a_server_without_an_admin_key_says_so(start_server: StartServer, command: Command) -> None:
    said = command("engines", code=1, url=start_server().url)
    assert "(the server was started without --admin-key)" in said
