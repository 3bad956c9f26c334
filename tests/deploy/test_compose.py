"""The three containers of docker-compose.yml, built and started.

Run by `make compose-test` only: they need a Docker daemon, a package index and some minutes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
BUILD_S, START_S, RECOVER_S = 900, 240, 60

pytestmark = [
    pytest.mark.skipif(
        "COMPOSE_TEST" not in os.environ, reason="only with COMPOSE_TEST=1 (make compose-test)"
    ),
    pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed"),
    pytest.mark.timeout(BUILD_S + START_S + RECOVER_S),
]

KILL = """
import os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if process.name not in ("1", str(os.getpid())):
        if b"services." in (process / "cmdline").read_bytes():
            os.kill(int(process.name), signal.SIGKILL)
"""


class Stack:
    """A `docker compose` project with its own name and port."""

    def __init__(self, project: str, port: int) -> None:
        self.project = project
        self.environment = os.environ | {"PORT": str(port), "MODEL": "demo"}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def compose(self, *arguments: str, timeout: float = 60, allowed: Sequence[int] = (0,)) -> str:
        done = subprocess.run(
            ["docker", "compose", "--project-name", self.project, *arguments],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode in allowed, f"{arguments}:\n{done.stdout[-4000:]}"
        return done.stdout

    def start(self) -> None:
        self.compose("build", timeout=BUILD_S)
        try:
            self.compose("up", "--detach", "--wait", "--wait-timeout", f"{START_S}", timeout=300)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{self.compose('logs', '--tail', '40')}") from error

    def kill(self, service: str) -> None:
        """Kill the service from inside: Docker does not restart a container after `docker kill`."""
        killed_too = 128 + signal.SIGKILL  # of `exec`, which ends with its container
        self.compose("exec", "-T", service, "python", "-c", KILL, allowed=(0, killed_too))

    def capital(self) -> str:
        """Return the model's answer to a question whose answer is Paris."""
        answer = self.client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            },
        )
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.client.get("/readyz", timeout=5).status_code == 200
        return False

    def state(self, service: str, field: str) -> str:
        """Return a field of the container's state from `docker inspect`."""
        container = self.compose("ps", "--quiet", service).strip()
        return subprocess.run(
            ["docker", "inspect", "--format", f"{{{{.State.{field}}}}}", container],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.5)
    return False


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    from tests.conftest import unused_port

    stack = Stack(f"mlms-test-{os.getpid()}", unused_port())
    try:
        stack.start()
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "20", timeout=120)
        stack.client.close()


def test_the_three_containers_are_healthy_and_answer(stack: Stack) -> None:
    for service in ("router", "engine", "kvstore"):
        assert stack.state(service, "Health.Status") == "healthy"
    assert "Paris" in stack.capital()


def test_an_answer_streams(stack: Stack) -> None:
    request = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    with stack.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert "Paris" in "".join(lines)


@pytest.mark.parametrize("service", ["engine", "kvstore", "router"])
def test_a_killed_container_is_restarted_and_serves(stack: Stack, service: str) -> None:
    started = stack.state(service, "StartedAt")
    stack.kill(service)
    assert eventually(lambda: stack.state(service, "StartedAt") != started, RECOVER_S)
    assert eventually(stack.is_ready, RECOVER_S), stack.compose("logs", "--tail", "40")
    assert "Paris" in stack.capital()
