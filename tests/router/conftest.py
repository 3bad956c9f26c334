from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.router.chat_tokenizer import write_chat_tokenizer
from tests.router.scripted_engine import EOS, ScriptedEngine
from tests.router.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]


class Server:
    """A real router process on a private port, with a client."""

    def __init__(self, socket_dir: Path, log: Path, *flags: str) -> None:
        self.address = f"ipc://{socket_dir}/engines"
        self.log = log
        self._out = log.open("w")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLX_LM_SERVER_")}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "services.processes.router",
                "--host=127.0.0.1",
                "--port=0",
                f"--engine-socket={self.address}",
                *flags,
            ],
            cwd=ROOT,
            env=environment,
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )
        self.url = self._wait_for_url()
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"listening on (https?://\S+:\d+)", self.log.read_text())
            if found:
                return found.group(1)
            time.sleep(0.02)
        raise AssertionError(f"the router did not start: {self.log.read_text()}")

    def wait_ready(self) -> None:
        eventually(lambda: self.client.get("/readyz").status_code == 200, 60)

    @property
    def num_tokens(self) -> int:
        """The tokens that the router has got so far, for requests without a key."""
        name = 'mlx_lm_server_key_generated_tokens_total{key=""} '
        lines = self.client.get("/metrics").text.splitlines()
        return sum(int(float(line.removeprefix(name))) for line in lines if line.startswith(name))

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, **fields})

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    def stop(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._out.close()


def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a chat template; a module's ``model_dir`` may be this one."""
    directory = tmp_path_factory.mktemp("chat-model")
    write_chat_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="rt-") as short:

        def start(*flags: str) -> Server:
            socket_dir = Path(tempfile.mkdtemp(dir=short))
            server = Server(socket_dir, tmp_path_factory.mktemp("log") / "log", *flags)
            servers.append(server)
            return server

        yield start
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    """One router for all tests of a module."""
    return start_server("--restart-wait-s=3", "--max-request-bytes=20000")


@pytest.fixture
def start_engine(model_dir: Path) -> Iterator[Callable[..., ScriptedEngine]]:
    engines: list[ScriptedEngine] = []

    def start(server: Server, **options: Any) -> ScriptedEngine:
        engine = ScriptedEngine(server.address, options.pop("directory", model_dir), **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.leave()


@pytest.fixture
def engine(
    server: Server, start_engine: Callable[..., ScriptedEngine], says: Callable[[str], Any]
) -> ScriptedEngine:
    """A ready engine that answers "hello world"."""
    engine = start_engine(server, script=says("hello world"))
    server.wait_ready()
    return engine


@pytest.fixture(scope="module")
def says(tokenizer: Tokenizer) -> Callable[[str], Callable[[object], list[int]]]:
    """Return a function that makes the script of an engine: it says ``text`` and ends."""
    return lambda text: lambda submit: [*tokenizer.encode(text).ids, EOS]
