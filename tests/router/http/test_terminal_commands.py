"""`mlx-lm-server chat`, `status` and `doctor` beside a real router, in a terminal or a pipe."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

import pexpect
import pytest

from services.commands import cli
from services.commands.doctor import meeting
from shared.settings import parse
from tests.router.conftest import ROOT, Background, Server, StartServer, ok
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
def in_terminal(
    *words: str, code: int = 0, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[pexpect.spawn]:
    """Run a command in a terminal of 80 columns, which answers no questions about the cursor, and
    check its exit code."""
    own = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
    outside = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    command = pexpect.spawn(
        sys.executable,
        ["-m", "mlx_lm_server", *words],
        cwd=str(ROOT),
        env={**outside, **own},
        dimensions=(40, 80),
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
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
    environment = {"MLX_LM_SERVER_API_KEY": KEY, "XDG_STATE_HOME": str(tmp_path)}
    with in_terminal(*words, environment=environment) as chat:
        chat.expect_exact("/help lists commands")
        for question in ("Who are you?", "And now?"):
            chat.send(f"{question}\r")
            chat.expect_exact("hello there")
            chat.expect("tokens, .*first token after")
        chat.send("/nonsense\r")
        chat.expect_exact("unknown command /nonsense")
        chat.send("/undo\r")
        chat.expect_exact("removed: And now?")
        chat.send("/set temperature hot\r")
        chat.expect_exact('temperature "hot"')
        chat.send("What is wrong?\r")
        chat.expect_exact("temperature")
        chat.send("/set temperature\r")
        chat.expect_exact("have the server's defaults")
        chat.send("/retry\r")
        chat.expect_exact("hello there")
        chat.send(f"/save {saved}\r")
        chat.expect_exact("saved to")
        chat.send("/quit\r")
    assert json.loads(saved.read_text()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "hello there"},
    ]
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


def test_what_goes_wrong_is_one_line_and_an_exit_code(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    code, out, error = ask(piped="")
    assert (code, out) == (1, "") and "standard input is empty" in error
    code, _, error = ask("hi", "--model", "other")
    assert code == 1 and "other" in error and error.count("\n") == 1
    code, _, error = ask("hi", url=f"http://127.0.0.1:{free_port}")
    assert code == 3 and "no server responds" in error
    code, _, error = ask("hi", url="localhost")
    assert code == 3 and error.startswith("mlx-lm-server chat: --url: ")
    monkeypatch.setenv("EXAMPLE_KEY", "wrong")
    code, _, error = ask("hi", "--key-variable", "EXAMPLE_KEY")
    assert code == 1 and "(set the API key in $EXAMPLE_KEY)" in error


def test_the_status_in_a_terminal_is_live_until_q(served: Server) -> None:
    key = {"MLX_LM_SERVER_METRICS_KEY": "of another server", "MLX_LM_SERVER_API_KEY": KEY}
    with in_terminal("status", "--url", served.url, environment=key) as status:
        status.expect_exact("q: quit")
        status.expect_exact("engine-0")
        ok(served.chat("hi"))
        status.expect("first token [0-9]")  # of the model: the figures move
        status.send("q")


def test_the_live_status_says_how_far_a_long_prompt_is(
    served: Server, scripted: ScriptedEngine, background: Background
) -> None:
    key = {"MLX_LM_SERVER_API_KEY": KEY}
    scripted.behaviour.hold_tokens_after = 0
    scripted.behaviour.computed_prompt_tokens = 1
    with in_terminal("status", "--url", served.url, environment=key) as status:
        status.expect_exact("PROMPTS")
        answer = background(served.chat, "hi")
        status.expect(r"1/4 +[0-9.-]+ +[1-9][0-9]?%")
        scripted.behaviour.hold_tokens_after = None
        ok(answer.result(60))
        status.expect(r"0/4 +[0-9.-]+ +- ")
        status.send("q")


def test_the_live_status_says_what_key_it_lacks(served: Server) -> None:
    with in_terminal("status", "--url", served.url, code=1) as status:
        status.expect_exact("$MLX_LM_SERVER_METRICS_KEY or $MLX_LM_SERVER_API_KEY")


def test_the_status_once_is_plain_text_in_a_terminal(served: Server) -> None:
    with in_terminal("status", "--url", served.url, "--once") as status:
        status.expect_exact("ENGINE")
        status.expect("engine-0 +ready")


def test_the_doctor_knows_the_server_at_its_port_and_engines_of_another_version(
    served: Server,
) -> None:
    argv = ["--host=127.0.0.1", f"--port={urlsplit(served.url).port}"]
    port, versions, *_ = meeting.checks(parse(argv, {}, "prog"))
    assert (port.verdict, versions.verdict) == ("WARN", "BAD")
    assert "mlx-lm-server" in port.text and "is running there" in port.text
    assert "engine engine-0 has version test" in versions.text and versions.remedy
