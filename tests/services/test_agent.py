"""`mlx-lm-server agent`: what an agent is started with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.stand_ins.http_server import answering

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
    """A directory with agents that print how they were started."""
    for name in ("claude", "codex", "opencode"):
        path = tmp_path / name
        program = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
        path.write_text(f"#!{sys.executable}\n{program}\n")
        path.chmod(0o755)
    return tmp_path


def run(commands: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(commands), "ANTHROPIC_API_KEY": "theirs", **variables}
    return run_command("agent", *argv, **environment)


def test_claude_gets_its_settings_by_the_environment(url: str, commands: Path) -> None:
    done = run(commands, "claude", "--url", url, "--api-key=k", "-p", "hi", "--model", "x")
    arguments, environment = json.loads(done.stdout)
    assert arguments == ["-p", "hi", "--model", "x"]
    assert environment["ANTHROPIC_BASE_URL"] == url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert environment["ANTHROPIC_MODEL"] == "a"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10000"
    assert "ANTHROPIC_API_KEY" not in environment


def test_the_server_may_be_named_by_the_environment(url: str, commands: Path) -> None:
    done = run(commands, "claude", "--api-key=k", MLX_LM_SERVER_URL=url)
    assert json.loads(done.stdout)[1]["ANTHROPIC_BASE_URL"] == url
    other = run(commands, "claude", "--url", url, "--api-key=k", MLX_LM_SERVER_URL="http://x")
    assert json.loads(other.stdout)[1]["ANTHROPIC_BASE_URL"] == url


def test_codex_gets_its_settings_by_flags(url: str, commands: Path) -> None:
    done = run(commands, "codex", "--url", url, "--api-key=k", "--model=b", "exec", "hi")
    arguments, environment = json.loads(done.stdout)
    assert arguments[-2:] == ["exec", "hi"]
    assert f'model_providers.mlx_lm_server.base_url="{url}/v1"' in arguments
    assert 'model="b"' in arguments and "model_context_window=100000" in arguments
    assert environment["MLX_LM_SERVER_API_KEY"] == "k"


def test_opencode_gets_a_configuration_of_its_own(url: str, commands: Path) -> None:
    _, environment = json.loads(run(commands, "opencode", "--url", url, "--api-key=k").stdout)
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "mlx-lm-server/a"
    provider = config["provider"]["mlx-lm-server"]
    assert provider["options"]["baseURL"] == f"{url}/v1"
    assert provider["models"]["a"]["modalities"]["input"] == ["text", "image"]
    done = run(commands, "opencode", "--url", url, "--api-key=k", "--model=b")
    config = json.loads(json.loads(done.stdout)[1]["OPENCODE_CONFIG_CONTENT"])
    assert "modalities" not in config["provider"]["mlx-lm-server"]["models"]["b"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["claude", "--url", "URL"], 1, "set --api-key"),
        (["claude", "--url", "URL", "--api-key=x"], 1, "the API key is not valid"),
        (["claude", "--url", "URL", "--api-key=k", "--model=c"], 1, "its models are a, b"),
        (["claude", "--url", "URL", "--api-key=starting"], 1, "no ready model"),
        (["claude", "--url", "http://127.0.0.1:9"], 1, "no mlx-lm-server responds"),
        (["claude", "--url", "nonsense"], 1, "is not a server URL"),
        (["vim"], 2, "invalid choice"),
    ],
)
def test_an_error_says_what_to_do(
    url: str, commands: Path, arguments: list[str], code: int, message: str
) -> None:
    done = run(commands, *(url if each == "URL" else each for each in arguments))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


def test_an_agent_that_is_not_installed_is_named(url: str, tmp_path: Path) -> None:
    done = run(tmp_path, "codex", "--url", url)
    assert done.returncode == 2
    assert "command 'codex' not found" in done.stderr
