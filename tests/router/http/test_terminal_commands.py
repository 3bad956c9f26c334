"""`mlx-lm-server chat`, `status` and `doctor` beside a real router, in a terminal or a pipe."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pexpect
import pytest

from services.commands import cli
from services.commands.doctor import meeting
from shared.settings import parse
from tests.router.conftest import ROOT, Server, StartServer, ok
from tests.router.scripted_engine import ScriptedEngine

CHAT_MODEL = True
PATIENCE_S = 60
KEY = "sesame"
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def bare(start_server: StartServer) -> Server:
    server = start_server(f"--api-key={KEY}")
    server.client.headers["authorization"] = f"Bearer {KEY}"
    return server


@pytest.fixture(scope="module")
def scripted(bare: Server, model_dir: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(bare.address, model_dir, says="hello there", name="engine-0")
    yield engine
    engine.leave()


@pytest.fixture(scope="module")
def served(bare: Server, scripted: ScriptedEngine) -> Server:
    """A router with one engine."""
    bare.wait_ready()
    return bare


@contextmanager
def in_terminal(*words: str, code: int = 0, **environment: str) -> Iterator[pexpect.spawn]:
    """Run a command in a terminal of 80 columns, which answers no questions about the cursor, and
    check its exit code."""
    outside = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    env = {**outside, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
    options: dict[str, Any] = {"cwd": str(ROOT), "timeout": PATIENCE_S, "encoding": "utf-8"}
    argv = ["-m", "mlx_lm_server", *words]
    command = pexpect.spawn(sys.executable, argv, env=env, dimensions=(40, 80), **options)
    try:
        yield command
        command.expect(pexpect.EOF)
        command.close()
        assert command.exitstatus == code, command.before
    finally:
        command.close(force=True)


def test_a_conversation_in_a_terminal(served: Server, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    words = ("chat", "--url", served.url, "--system", "Be brief.")
    environment: Any = {"MLX_LM_SERVER_API_KEY": KEY, "XDG_STATE_HOME": str(tmp_path)}
    with in_terminal(*words, **environment) as chat:
        chat.expect_exact("/help lists commands")
        for question in ("Who are you?", "And now?"):
            chat.send(f"{question}\r")
            chat.expect_exact("hello there")
            chat.expect("tokens, .*first token after")
        for written, shown in (
            ("/nonsense", "unknown command /nonsense"),
            ("/undo", "removed: And now?"),
            ("/set temperature hot", 'temperature "hot"'),
            ("What is wrong?", "temperature"),
            ("/set temperature", "have the server's defaults"),
            ("/retry", "hello there"),
            (f"/save {saved}", "saved to"),
        ):
            chat.send(f"{written}\r")
            chat.expect_exact(shown)
        chat.send("/quit\r")
    turns = [(turn["role"], turn["content"]) for turn in json.loads(saved.read_text())]
    said = [("user", "Who are you?"), ("assistant", "hello there")]
    assert turns == [("system", "Be brief."), *said]
    history = tmp_path / "mlx-lm-server" / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+Who are you?" in history.read_text().splitlines()


@pytest.fixture
def ask(served: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that runs chat with something in its standard input."""
    monkeypatch.setenv("MLX_LM_SERVER_API_KEY", KEY)

    def run(*words: str, piped: str = "", url: str = served.url) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped.encode())))
        code = cli.main(["chat", "--url", url, *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_question_from_a_pipe_or_as_argument_is_answered_once(ask: Ask, served: Server) -> None:
    answered = 0, "hello there\n", ""
    assert ask(piped="Who are you?\n") == answered
    assert ask("Who", "are", "you?") == answered
    assert ask("Summarize:", piped="a text") == answered
    assert ask("hi", url=f"{served.url}/v1/") == answered


def test_errors_are_one_line(ask: Ask, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv("EXAMPLE_KEY", "wrong")
    errors: list[tuple[tuple[str, ...], dict[str, str], int, str]] = [
        ((), {}, 1, "standard input is empty"),
        (("hi", "--model", "other"), {}, 1, "other"),
        (("hi",), {"url": f"http://127.0.0.1:{free_port}"}, 3, "no server responds"),
        (("hi",), {"url": "localhost"}, 3, "mlx-lm-server chat: --url: "),
        (("hi", "--key-variable", "EXAMPLE_KEY"), {}, 1, "(set the API key in $EXAMPLE_KEY)"),
    ]
    for words, url, expected, said in errors:
        code, out, error = ask(*words, **url)
        assert (code, out, error.count("\n")) == (expected, "", 1) and said in error


def test_the_status_in_a_terminal_is_live_until_q(served: Server, scripted: ScriptedEngine) -> None:
    key: Any = {"MLX_LM_SERVER_METRICS_KEY": "of another server", "MLX_LM_SERVER_API_KEY": KEY}
    scripted.behaviour.hold_tokens_after = 0
    scripted.behaviour.computed_prompt_tokens = 1
    with in_terminal("status", "--url", served.url, **key) as status:
        status.expect_exact("q: quit")
        status.expect_exact("PROMPTS")
        status.expect_exact("engine-0")
        answer = served.begin("hi")
        status.expect(r"1/4 +[0-9.-]+ +[1-9][0-9]?%")  # how far the prompt is
        scripted.behaviour.hold_tokens_after = None
        ok(answer.result(60))
        status.expect(r"0/4 +[0-9.-]+ +- ")
        status.expect("first token [0-9]")  # of the model: the figures move
        status.send("q")


def test_the_live_status_says_what_key_it_lacks(served: Server) -> None:
    with in_terminal("status", "--url", served.url, code=1) as status:
        status.expect_exact("$MLX_LM_SERVER_METRICS_KEY or $MLX_LM_SERVER_API_KEY")


def test_the_status_once_is_plain_text_in_a_terminal(served: Server) -> None:
    with in_terminal("status", "--url", served.url, "--once") as status:
        status.expect_exact("ENGINE")
        status.expect("engine-0 +ready")


def test_the_doctor_knows_the_servers_port(served: Server) -> None:
    argv = ["--host=127.0.0.1", f"--port={urlsplit(served.url).port}"]
    port, *_ = meeting.checks(parse(argv, {}, "prog"))
    assert port.verdict == "WARN" and "an mlx-lm-server is running there" in port.text
