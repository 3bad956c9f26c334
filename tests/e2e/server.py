"""A whole server, started as a user starts it: real processes, a real port, real clients."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.forked.process import FORKS_VARIABLE, ForkedProcess, start_process
from tests.tiny_models import Kind

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 240.0
RANKS_VARIABLE = "TEST_RANKS"
"""Environment variable: the ranks of every engine, where a test does not say."""
DEMO_RANKS = 3
"""The demo model has 9 heads."""
RESUMED = "mlx_lm_server_resumed_requests_total"
HYBRID: Kind = "qwen3_5" if RANKS_VARIABLE in os.environ else "qwen3_next"
"""Layers with recurrent state and others. mlx-lm divides only the younger between ranks."""
READY_LINE = re.compile(r"ready: https?://[^:]+:(\d+)")
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

CHECKED = {"_MLX_LM_SERVER_CHECK_INTEGRITY": "1"}
"""Environment of engines that check their accounts after each step."""

# Engines are told apart by their command lines, which one that was a spare process lacks.
os.environ.setdefault("MLX_LM_SERVER_SPARE_ENGINE_AFTER_S", "0")


class Server:
    """A running server. ``log`` holds the lines that it has printed so far."""

    def __init__(self, process: subprocess.Popen[str] | ForkedProcess) -> None:
        self.process = process
        self.log: list[str] = []
        self.port = 0
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line.rstrip("\n"))
            match = READY_LINE.search(line)
            if match:
                self.port = int(match[1])
                self._ready.set()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._ready.wait(0.1):
            assert self.process.poll() is None, "the server ended:\n" + "\n".join(self.log)
            assert time.monotonic() < deadline, "not ready:\n" + "\n".join(self.log)
        self.client = httpx.Client(base_url=self.url, timeout=120)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pids(self, name: str = "") -> list[int]:
        """Return the processes below the supervisor whose command line contains ``name``."""
        return [pid for pid, command in descendants(self.process.pid) if name in command]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the one process of this name, such as "engine". Return its id."""
        (pid,) = self.pids(f"services.processes.{name}")
        os.kill(pid, number)
        return pid

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def complete(self, prompt: Any, max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
        fields = {"temperature": 0, "max_tokens": max_tokens, **fields}
        return self.answer("/v1/completions", prompt=prompt, **fields)

    def chat(self, content: Any, max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
        """Return the answer to a user's message, whose text is that of `content_of`."""
        fields = {"temperature": 0, "max_tokens": max_tokens, **fields}
        messages = [{"role": "user", "content": content}]
        return self.answer("/v1/chat/completions", messages=messages, **fields)

    def text(self, prompt: Any, max_tokens: int = 16, **fields: Any) -> str:
        """Return the text of a greedy completion."""
        return content_of(self.complete(prompt, max_tokens, **fields))

    def stream(self, prompt: Any, max_tokens: int, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a greedy completion, and ``{"done": True}`` if it ends."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0}
        body |= {"ignore_eos": True, **fields}
        # A client of its own: a stream that a failed test leaves open must not block the others.
        url = self.client.base_url.join("/v1/completions")
        with httpx.stream("POST", url, json=body, timeout=self.client.timeout) as answer:
            answer.raise_for_status()
            yield from events_of(answer)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if re.match(rf"{name}(\{{| )", line)]
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def wait_metric(self, name: str) -> None:
        """Wait until a metric is over 0. Engines and the kvstore send theirs in heartbeats."""
        self.wait_until(lambda: self.metric(name) > 0, 60, name)

    def wait_until(
        self, condition: Callable[[], bool], timeout_s: float = 90, what: str = "not in time"
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}:\n" + "\n".join(self.log[-40:])
            time.sleep(0.05)

    def engines(self) -> list[dict[str, Any]]:
        """Return what `/health` says of the engines of all models."""
        models = self.client.get("/health").json()["models"]
        return [engine for model in models for engine in model["engines"]]

    def ready_engines(self) -> list[str]:
        return sorted(engine["name"] for engine in self.engines() if engine["ready"])

    def sequences_in_flight(self) -> int:
        """Return the number of sequences that the router has placed on engines."""
        return sum(engine["sequences"] for engine in self.engines())

    def is_ready(self) -> bool:
        try:
            return self.client.get("/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


def on_ranks(count: int) -> list[str]:
    """Return flags for engines of so many processes."""
    return ["--distributed-mode", "ring", "--num-local-ranks", str(count)] if count > 1 else []


def private_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a new directory with a short path, since paths of sockets are limited."""
    return tempfile.TemporaryDirectory(prefix="mlms-", dir="/tmp")


@contextmanager
def serving(model: str | Path | None, *flags: str, **environment: str) -> Iterator[Server]:
    """Run a server on a free port, stop it, and fail if any of its processes is left.

    Without a ``model``, ``flags`` have to name a file that has some. The client has the first
    ``--api-key``. All processes are forked (`tests.forked.process`), unless ``TEST_FORKS`` is 0.
    """
    with private_directory() as private:
        command = [] if model is None else ["--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", "0"]
        if "--kv-bits" not in flags:  # texts are compared with mlx-lm, whose cache is not quantized
            command += ["--kv-bits", "16"]
        if (ranks := os.environ.get(RANKS_VARIABLE)) and "--distributed-mode" not in flags:
            command += on_ranks(DEMO_RANKS if str(model).startswith("demo") else int(ranks))
        if "--ssd-cache-dir" not in flags:
            command += ["--ssd-cache-dir", f"{private}/ssd"]
        command += ["--disk-reserve-gb", "0"]  # tests run on full disks too
        if "--restart-wait-s" not in flags:  # engines start slowly beside other tests
            command += ["--restart-wait-s", "120"]
        environ = {**os.environ, "XDG_RUNTIME_DIR": private, **environment}
        if str(model).startswith("demo"):  # a fork lacks the allocator's settings
            environ[FORKS_VARIABLE] = "0"
        with _running(start_process("mlx_lm_server", [*command, *flags], environ)) as server:
            if "--api-key" in flags:
                key = flags[flags.index("--api-key") + 1]
                server.client.headers["authorization"] = f"Bearer {key}"
            yield server


@contextmanager
def serving_alone(model: Path, *flags: str) -> Iterator[Server]:
    """Run ``mlx-lm-server --model NAME`` with nothing but the defaults, in the directory that has
    ``model`` and with a home of its own. ``flags`` are for tests that run beside others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_LM_SERVER_", "XDG_"))}
    with private_directory() as home:
        process = start_process(
            "mlx_lm_server",
            ["--model", model.name, *flags],
            {**kept, "HOME": home, "PYTHONPATH": str(ROOT)},
            directory=model.parent,
        )
        with _running(process) as server:
            yield server


@contextmanager
def _running(process: subprocess.Popen[str] | ForkedProcess) -> Iterator[Server]:
    """Yield a server once it is ready. Stop it, and fail if any of its processes is left."""
    server = Server(process)
    try:
        server.wait_ready()
        yield server
    finally:
        children = server.pids()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            left = [pid for pid in children if is_running(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            if process.poll() is None:
                process.kill()
    assert not left, f"processes left over: {left}\n" + "\n".join(server.log[-40:])


def llama_server(*flags: str, **environment: str) -> Any:
    """Return a fixture for the tests of a module: a server of the tiny llama."""

    @pytest.fixture(scope="module")
    def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
        with serving(tiny_model("llama"), *flags, **environment) as running:
            yield running

    return server


def at_once(ask: Callable[[Asked], Answer], asked: Collection[Asked]) -> list[Answer]:
    """Return what ``ask`` returns for each of ``asked``, with a thread for each."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream, and ``{"done": True}`` if it ends."""
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
        elif line == "data: [DONE]":
            yield {"done": True}


def pieces(client: httpx.Client, **body: Any) -> Iterator[str]:
    """Yield the pieces of a completion's text as they arrive. Fail if it does not end well."""
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for event in events_of(answer):
            if "done" in event:
                return
            assert "error" not in event, event
            yield event["choices"][0]["text"]
    raise AssertionError("the stream was cut")


def cached_tokens(answer: dict[str, Any]) -> int:
    """Return how many tokens of the prompt were found."""
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def content_of(answer: dict[str, Any]) -> str:
    """Return the text of the only choice of a `Server.chat` or a `Server.complete`."""
    (choice,) = answer["choices"]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def text_of(events: list[dict[str, Any]]) -> str:
    """Return the text of a whole `Server.stream`."""
    assert events[-1] == {"done": True}, events[-1]
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices)


def assert_error(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """Check an error answer, and return its error object."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert code is None or error["code"] == code, answer.text
    return error


def assert_retry(answer: httpx.Response, status: int, code: str) -> None:
    """Check an error answer that tells when to try again."""
    assert_error(answer, status, code)
    assert int(answer.headers["retry-after"]) >= 1


def ps(*options: str) -> str:
    """Return what the command `ps` prints of processes: nothing of those that have ended."""
    return subprocess.run(["ps", *options], capture_output=True, text=True, check=False).stdout


def descendants(root: int) -> list[tuple[int, str]]:
    """Return (pid, command line) of each process below ``root``."""
    table: dict[int, tuple[int, str]] = {}
    for line in ps("-A", "-ww", "-o", "pid=,ppid=,stat=,args=").splitlines():
        pid, parent, state, command = line.split(None, 3)
        if not state.startswith("Z"):
            table[int(pid)] = (int(parent), command)
    assert table, "no processes are listed"
    found: list[tuple[int, str]] = []
    todo = [root]
    while todo:
        top = todo.pop()
        below = [(pid, command) for pid, (above, command) in table.items() if above == top]
        found += below
        todo += [pid for pid, _ in below]
    return found


def is_running(pid: int) -> bool:
    """Return whether a process runs or is stopped. One that has ended does not, also while its
    parent, which may be a slow init, has not waited for it."""
    state = ps("-o", "stat=", "-p", str(pid))
    return bool(state.strip()) and not state.startswith("Z")


def cpu_s(*pids: int) -> float:
    """Return the CPU seconds of processes so far, where there is /proc."""
    lines = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
    ticks = [map(int, line.rpartition(")")[2].split()[11:13]) for line in lines]
    return sum(map(sum, ticks)) / os.sysconf("SC_CLK_TCK")


def wait_ended(pids: Sequence[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)
