"""A `docker compose` project: driven by its command, looked at through the daemon's SDK."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import httpx

ROOT = Path(__file__).parents[2]
BUILD_S, START_S, RECOVER_S = 900, 300, 120
PROJECT_LABEL, SERVICE_LABEL = "com.docker.compose.project", "com.docker.compose.service"
CAPITAL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
_OF_COMPOSE = ("COMPOSE_PROFILES", "MODEL", "MODELS", "PORT")

KILL = """
import os, pathlib, signal
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if process.name not in ("1", str(os.getpid())):
        if b"mlx" in (process / "cmdline").read_bytes():
            os.kill(int(process.name), signal.SIGKILL)
"""


class Stack:
    """A project with its own name and port."""

    def __init__(self, project: str, port: int, *flags: str, **variables: str) -> None:
        """``flags`` are those of `docker compose` itself, such as ``--profile``."""
        self.daemon = docker.from_env(timeout=120)
        self.project, self._flags = project, flags
        outside = {k: v for k, v in os.environ.items() if k not in _OF_COMPOSE}
        self._environment = outside | {"PORT": str(port)} | variables
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def compose(self, *arguments: str, timeout: float = 120, **variables: str) -> str:
        done = subprocess.run(
            ["docker", "compose", *self._flags, "--project-name", self.project, *arguments],
            cwd=ROOT,
            env=self._environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{arguments}:\n{done.stdout[-4000:]}"
        return done.stdout

    def up(self, *arguments: str, **variables: str) -> float:
        """Start what is not as wanted; return the seconds until all is healthy."""
        began = time.monotonic()
        wait = ("--wait", "--wait-timeout", f"{START_S}")
        try:
            self.compose("up", "--detach", *wait, *arguments, timeout=START_S + 60, **variables)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error
        return time.monotonic() - began

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "30")

    def close(self) -> None:
        self.down()
        self.client.close()
        self.daemon.close()

    def logs(self) -> str:
        return self.compose("logs", "--tail", "40")

    # -- through the SDK --------------------------------------------------------

    def containers(self, service: str | None = None) -> list[Any]:
        labels = [f"{PROJECT_LABEL}={self.project}"]
        labels += [f"{SERVICE_LABEL}={service}"] if service else []
        found: list[Any] = self.daemon.containers.list(all=True, filters={"label": labels})
        return found

    def leftovers(self) -> list[str]:
        """Return the names of what the daemon has of this project."""
        wanted = {"filters": {"label": f"{PROJECT_LABEL}={self.project}"}}
        networks, volumes = self.daemon.networks.list(**wanted), self.daemon.volumes.list(**wanted)
        return [each.name for each in (*self.containers(), *networks, *volumes)]

    def started_at(self, service: str) -> list[str]:
        return [each.attrs["State"]["StartedAt"] for each in self.containers(service)]

    def kill(self, service: str) -> None:
        """Kill the service from inside: Docker does not restart a container after `docker kill`."""
        for container in self.containers(service):
            container.exec_run(["python", "-c", KILL])

    # -- through the API --------------------------------------------------------

    def capital(self, model: str = "demo") -> str:
        """Return the model's answer to a question whose answer is Paris."""
        answer = self.client.post("/v1/chat/completions", json={"model": model, **CAPITAL})
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    def ready_engines(self) -> list[str]:
        """Return the names of the engines that take requests, once all models can answer."""
        with contextlib.suppress(httpx.HTTPError):
            if self.client.get("/readyz", timeout=5).json()["reasons"]:
                return []
            models = self.client.get("/health", timeout=5).json()["models"]
            return [e["name"] for model in models for e in model["engines"] if e["ready"]]
        return []


def eventually(condition: Callable[[], bool], within_s: float = RECOVER_S) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.5)
    return False


@contextlib.contextmanager
def load(stack: Stack, clients: int) -> Iterator[list[str]]:
    """Send questions all the time; yield what has come back so far: texts, or what failed."""
    answers: list[str] = []
    end = threading.Event()

    def ask() -> None:
        while not end.is_set():
            try:
                answers.append(stack.capital())
            except (AssertionError, httpx.HTTPError) as error:
                answers.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        end.set()
        for thread in threads:
            thread.join()
