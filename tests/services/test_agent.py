"""`mlx-lm-server agent`: what an agent is started with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path

import pytest

from services.commands import cli
from tests.commands import exit_code_of, run_command
from tests.stand_ins.http_server import answering

Run = Callable[..., tuple[list[str], dict[str, str]]]
PRINTING = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
"""An agent that prints how it was started."""
MODELS = {
    "data": [
        {
            "id": "a",
            "context_length": 40_000,
            "max_prompt_tokens": 40_000,
            "capabilities": ["completion", "vision"],
        },
        {
            "id": "b",
            "context_length": 200_000,
            "max_prompt_tokens": 100_000,
            "capabilities": ["completion"],
        },
    ]
}


def models_for(path: str, headers: Message) -> tuple[int, bytes]:
    key = headers["Authorization"]
    body = {"data": []} if key == "Bearer starting" else MODELS
    return 200 if key in ("Bearer k", "Bearer starting") else 401, json.dumps(body).encode()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that has two models for the key k."""
    with answering(models_for) as url:
        yield url


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory with agents."""
    for name in ("claude", "codex", "opencode"):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{PRINTING}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def run(url: str, commands: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command in this process. It returns the arguments and the
    environment of the agent that would take the place of this process."""
    started: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setattr(os, "execvpe", lambda *arguments: started.append(arguments))

    def run(name: str, *argv: str) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(AssertionError):
            cli.main(["agent", name, "--url", url, "--api-key=k", *argv])
        file, (command, *arguments), environment = started.pop()
        assert file == command == name
        return arguments, environment

    return run


def test_claude_gets_its_settings_by_the_environment(url: str, commands: Path) -> None:
    words = ("claude", "--url", url, "--api-key=k", "-p", "hi", "--model", "x")
    done = run_command("agent", *words, PATH=str(commands), ANTHROPIC_API_KEY="theirs")
    arguments, environment = json.loads(done.stdout)
    assert arguments == ["-p", "hi", "--model", "x"]
    assert environment["ANTHROPIC_BASE_URL"] == url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert environment["ANTHROPIC_MODEL"] == "a"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10000"
    assert "ANTHROPIC_API_KEY" not in environment


def test_codex_gets_its_settings_by_flags(url: str, run: Run) -> None:
    arguments, environment = run("codex", "--model=b", "exec", "hi")
    assert arguments[-2:] == ["exec", "hi"]
    assert f'model_providers.mlx_lm_server.base_url="{url}/v1"' in arguments
    assert 'model="b"' in arguments and "model_context_window=100000" in arguments
    assert environment["MLX_LM_SERVER_API_KEY"] == "k"


def test_opencode_gets_a_configuration_of_its_own(url: str, run: Run) -> None:
    config = json.loads(run("opencode")[1]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "mlx-lm-server/a"
    provider = config["provider"]["mlx-lm-server"]
    assert provider["options"]["baseURL"] == f"{url}/v1"
    assert provider["models"]["a"]["modalities"]["input"] == ["text", "image"]
    config = json.loads(run("opencode", "--model=b")[1]["OPENCODE_CONFIG_CONTENT"])
    assert "modalities" not in config["provider"]["mlx-lm-server"]["models"]["b"]


def test_the_server_may_be_named_by_the_environment(
    url: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_LM_SERVER_URL", "http://x")
    assert run("claude")[1]["ANTHROPIC_BASE_URL"] == url, "the flag comes first"
    monkeypatch.setenv("MLX_LM_SERVER_URL", url)
    with pytest.raises(AssertionError):
        cli.main(["agent", "claude", "--api-key=k"])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["claude", "--url", "URL"], 1, "set --api-key"),
        (["claude", "--url", "URL", "--api-key=x"], 1, "the API key is not valid"),
        (["claude", "--url", "URL", "--api-key=k", "--model=c"], 1, "its models are a, b"),
        (["claude", "--url", "URL", "--api-key=starting"], 1, "no ready model"),
        (["claude", "--url", "http://127.0.0.1:9"], 1, "no server responds"),
        (["claude", "--url", "nonsense"], 1, "does not begin with http"),
        (["vim"], 2, "invalid choice"),
    ],
)
@pytest.mark.usefixtures("run")
def test_an_error_says_what_to_do(
    url: str, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = exit_code_of("agent", *(url if each == "URL" else each for each in arguments))
    said, error = capsys.readouterr()
    assert (found, said) == (code, "") and message in error


def test_an_agent_that_is_not_installed_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["agent", "codex", "--url", url]) == 2
    assert "command 'codex' not found" in capsys.readouterr().err
