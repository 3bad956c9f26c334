from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from tokenizers import Tokenizer

from router.tokens.vocabulary import Vocabulary
from tests.conftest import eventually as eventually
from tests.router.chat_tokenizer import write_chat_tokenizer
from tests.router.fim_tokenizer import write_fim_tokenizer
from tests.router.router_process import RouterProcess
from tests.router.scripted_engine import ScriptedEngine
from tests.router.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]
FLAGS = ("--restart-wait-s=3", "--max-request-bytes=20000")
StartServer = Callable[..., "Server"]
THREADS = ThreadPoolExecutor(32)
BEGUN: list[Future[Any]] = []
"""Calls on these threads. They end before the next test begins."""


class Server:
    """A real router process on a private port, with a client."""

    engines: ClassVar[list[ScriptedEngine]] = []
    """Those that leave when the test ends."""

    def __init__(
        self,
        socket_dir: Path,
        log: Path,
        model_dir: Path,
        *flags: str,
        max_descriptors: int | None = None,
    ) -> None:
        self.address = f"ipc://{socket_dir}/engines"
        self.log = log
        self.model_dir = model_dir
        here = ("--host=127.0.0.1", "--port=0", f"--engine-socket={self.address}")
        self.process = RouterProcess([*here, *flags], log, max_descriptors)
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

    def wait_unready(self) -> None:
        eventually(lambda: self.client.get("/readyz").status_code == 503)

    def wait_replicas(self, count: int) -> None:
        """Wait until ``count`` engines of the usual model are ready."""
        card = partial(self.client.get, "/v1/models/tiny")
        eventually(lambda: card().json().get("ready_replicas") == count)

    def wait_tokens(self, count: int) -> None:
        eventually(lambda: self.num_tokens == count)

    def start_engine(self, says: str | None = None, **options: Any) -> ScriptedEngine:
        """Start an engine that answers ``says`` until the test ends."""
        directory = options.pop("directory", self.model_dir)
        self.engines.append(ScriptedEngine(self.address, directory, says=says, **options))
        return self.engines[-1]

    def join(self, says: str | None = None, **options: Any) -> ScriptedEngine:
        """Start an engine, and wait until the server is ready."""
        engine = self.start_engine(says, **options)
        self.wait_ready()
        return engine

    def join_as(self, model: str, says: str | None = None, **options: Any) -> ScriptedEngine:
        """Start an engine of another model, and wait until it is ready."""
        engine = self.start_engine(says, model=model, **options)
        card = partial(self.client.get, f"/v1/models/{model}")
        eventually(lambda: card().json().get("ready_replicas") == 1)
        return engine

    @property
    def engine(self) -> ScriptedEngine:
        """The engine that was started last."""
        return self.engines[-1]

    @property
    def num_tokens(self) -> int:
        """The tokens that the router has got so far, for requests without a key."""
        return int(self.metric('key_generated_tokens_total{key=""}'))

    @property
    def metrics(self) -> str:
        return self.client.get("/metrics").text

    def metric(self, name: str) -> float:
        """Return the sum of the samples that begin with ``name``. With a space at its end, there
        must be one."""
        lines = self.metrics.splitlines()
        found = [line for line in lines if line.startswith(f"mlx_lm_server_{name}")]
        assert found or not name.endswith(" "), name
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def chat(self, text: str = "hello", /, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, **fields})

    def begin(self, text: str = "hello", /, **fields: Any) -> Future[httpx.Response]:
        """Ask in the background."""
        return begin(self.chat, text, **fields)

    def complete(self, prompt: Any = "hello", /, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def stream_until(
        self, shown: str, then: Callable[[], object], path: str, /, **body: Any
    ) -> str:
        """Return the text of a stream. Call ``then`` while it has ``shown`` in it."""
        text = ""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            for part in answer.iter_text():
                text += part
                if shown in text:
                    then()
        return text

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


def begin(call: Callable[..., Any], /, *args: Any, **fields: Any) -> Future[Any]:
    """Start a call on a thread."""
    BEGUN.append(THREADS.submit(call, *args, **fields))
    return BEGUN[-1]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds, in an event loop."""
    while not condition():
        await asyncio.sleep(0.01)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def key_flag(directory: Path, *lines: str) -> str:
    """Write a file of API keys, and return the flag that names it."""
    (directory / "keys").write_text("\n".join([*lines, ""]))
    return f"--api-key-file={directory / 'keys'}"


def ok(answer: httpx.Response) -> httpx.Response:
    """Return an answer, which must have status 200."""
    assert answer.status_code == 200, answer.text
    return answer


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return the error of an answer, which must have this status."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["message"]
    return error


def events(text: str) -> list[Any]:
    """Return the events of a stream of OpenAI's completions that ended without an error."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1] if not line.startswith(":")]


def named_events(text: str) -> list[Any]:
    """Return the events of a stream in which the name of each is the type in its data."""
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def text_of(answer: httpx.Response) -> str:
    """Return the text of a chat's answer."""
    return str(ok(answer).json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat-model")
    write_chat_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def plain_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def fim_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fim-model")
    write_fim_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model_dir(request: pytest.FixtureRequest, chat_model_dir: Path, plain_model_dir: Path) -> Path:
    """Return a model, with a chat template if the module has ``CHAT_MODEL = True``."""
    return chat_model_dir if getattr(request.module, "CHAT_MODEL", False) else plain_model_dir


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> Any:
    """Return the tokenizer as mlx-lm loads it."""
    from mlx_lm import tokenizer_utils

    return tokenizer_utils.load(model_dir)


@pytest.fixture(scope="module")
def vocabulary(loaded: Any) -> Vocabulary:
    return Vocabulary(loaded)


@pytest.fixture(scope="module")
def start_server(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="rt-") as short:

        def start(*flags: str, max_descriptors: int | None = None) -> Server:
            socket_dir, log = Path(tempfile.mkdtemp(dir=short)), tmp_path_factory.mktemp("log")
            limited = {"max_descriptors": max_descriptors}
            servers.append(Server(socket_dir, log / "log", model_dir, *flags, **limited))
            return servers[-1]

        yield start
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, start_server: StartServer) -> Server:
    """Return the router of a module, with its ``FLAGS``."""
    return start_server(*getattr(request.module, "FLAGS", FLAGS))


@pytest.fixture(autouse=True)
def engines_leave() -> Iterator[None]:
    yield
    wait(BEGUN)
    BEGUN.clear()
    while Server.engines:
        Server.engines.pop(0).leave()


@pytest.fixture
def engine(server: Server) -> ScriptedEngine:
    return server.join("hello world")


@pytest.fixture
def served(server: Server, engine: ScriptedEngine) -> Server:
    """Return the server of a module, with an engine."""
    return server


@pytest.fixture(scope="module")
def lasting_engine(server: Server, model_dir: Path) -> Iterator[ScriptedEngine]:
    """Return an engine that all tests of a module share."""
    engine = ScriptedEngine(server.address, model_dir, says="hello world")
    server.wait_ready()
    yield engine
    engine.leave()
