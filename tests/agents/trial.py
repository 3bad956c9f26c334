"""An agent's work on a temporary project, with a real server and a model that acts a script."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.agents.installing import version
from tests.agents.model import MODEL
from tests.agents.recorder import Recorder, Request, recording
from tests.agents.scripts import AFTER, BEFORE, ENDLESS, FINAL, TASK, Agent
from tests.agents.tool_search import QUESTION, TOOL_SEARCHES
from tests.e2e.server import ROOT, Server

_TASK_S = 300
_LEAST_CONTEXT = 32_768
"""An agent's second hour has more tokens."""
_FAILED = re.compile(r"no such file|not found|does not exist|failed to match", re.IGNORECASE)
_DEAD = "http://127.0.0.1:9"
"""Nothing listens there."""


class Outcome(NamedTuple):
    """What an agent did. ``trouble`` is empty if all went well."""

    version: str
    paths: list[str]
    """To which it sent requests."""
    requests: int
    prompt_tokens: int
    cached_tokens: int
    trouble: str


class Trial:
    """One agent, which works in the directory ``private``/project on ``server``."""

    def __init__(self, agent: Agent, found: Path, private: Path, server: Server) -> None:
        self.agent = agent
        self._found = found  # the directory of its command
        self._project = private / "project"
        self._home = private / f"home-{agent.name}"
        self._server = server

    def run(self, *, kills: bool = True) -> Outcome:
        """Kill the agent within an answer, if it ``kills``, and let it do the task."""
        with recording(self._server.port) as recorder:
            trouble = self._cancel(recorder) if kills else ""
            recorder.requests.clear()
            trouble = trouble or self._do_task(recorder)
            return self._outcome(recorder.requests, trouble)

    def find_tool(self) -> str:
        """Ask what one of 60 tools knows. Return what went wrong, if anything did."""
        search = TOOL_SEARCHES[self.agent.name]
        self.lay_out(BEFORE)
        with recording(self._server.port) as recorder:
            arguments = search.arguments(QUESTION, self._project)
            code, printed = self.work(recorder.url, arguments)
            if code:
                return f"exit code {code}:\n{printed[-2000:]}"
            return search.trouble(recorder.requests, printed) or "; ".join(_refused(self._server))

    def lay_out(self, notes: str) -> None:
        """Make a project with the file notes.txt."""
        shutil.rmtree(self._project, ignore_errors=True)
        self._project.mkdir()
        self._home.mkdir(exist_ok=True)
        (self._project / "notes.txt").write_text(notes)
        subprocess.run(["git", "init", "--quiet"], cwd=self._project, check=True)

    def work(self, url: str, arguments: Sequence[str], typed: str = "") -> tuple[int, str]:
        """Start the agent with ``arguments``. Return its exit code and what it printed."""
        process = self._start(url, arguments, typed)
        try:
            printed, _ = process.communicate(timeout=_TASK_S)
        except subprocess.TimeoutExpired:
            return 1, f"not done after {_TASK_S} s"
        finally:
            _kill(process)
        return process.returncode, printed

    def _start(self, url: str, arguments: Sequence[str], typed: str = "") -> subprocess.Popen[str]:
        """Start the agent in a session of its own."""
        with tempfile.TemporaryFile("w+") as file:  # some agents read all of it before they begin
            file.write(typed)
            file.seek(0)
            return subprocess.Popen(
                self._command(url, arguments),
                cwd=self._project,
                env=self._environment(url),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def _command(self, url: str, arguments: Sequence[str]) -> list[str]:
        if self.agent.from_pypi:
            return [str(self._found / self.agent.name), "--model", f"openai/{MODEL}", *arguments]
        start = [sys.executable, "-m", "services.commands.cli", "agent", self.agent.name]
        return [*start, "--url", url, *arguments]

    def _environment(self, url: str) -> dict[str, str]:
        return {
            **{name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ},
            **self.agent.environment,
            "PATH": f"{self._found}:{os.environ['PATH']}",
            "HOME": str(self._home),
            "PYTHONPATH": str(ROOT),
            **dict.fromkeys(("HTTPS_PROXY", "https_proxy"), _DEAD),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
            **({"OPENAI_API_BASE": f"{url}/v1"} if self.agent.from_pypi else {}),
            **({"OPENAI_API_KEY": "none"} if self.agent.from_pypi else {}),
        }

    def _cancel(self, recorder: Recorder) -> str:
        server = self._server
        self.lay_out(BEFORE)
        process = self._start(recorder.url, self.agent.arguments(ENDLESS))
        aborts = partial(server.metric, "mlx_lm_server_aborts_total")
        try:
            try:
                server.wait_until(lambda: server.sequences_in_flight() > 0, _TASK_S, "no answer")
                before = _generated(server)
                server.wait_until(lambda: _generated(server) > before + 20, 60, "no tokens come")
            finally:
                _kill(process)
            server.wait_until(lambda: server.sequences_in_flight() == 0, 60, "an answer goes on")
            server.wait_until(lambda: aborts() > 0, 10, "nothing was cancelled")
        except AssertionError as error:
            return str(error)
        return ""

    def _do_task(self, recorder: Recorder) -> str:
        self.lay_out(BEFORE)
        code, printed = self.work(recorder.url, self.agent.arguments(TASK))
        refused = [line for line in self._server.log if re.search(r" (error|warning) ", line)]
        tail = "\n".join([*printed.splitlines()[-20:], *refused])
        if code:
            return f"exit code {code}:\n{tail}"
        if (self._project / "notes.txt").read_text() != AFTER:
            return f"notes.txt is not as it should be:\n{tail}"
        if FINAL not in printed:
            return f"no answer:\n{tail}"
        if not self.agent.from_pypi and not self._was_told(recorder.url, printed):
            return f"`mlx-lm-server agent` told of another server, model or context:\n{printed}"
        results = tool_results(max((each.body for each in recorder.requests), key=_length))
        if not any(map(_FAILED.search, results)):
            return f"the model was not told of an error: {results}"
        return "; ".join(_refused(self._server))

    def _was_told(self, url: str, printed: str) -> bool:
        """Return whether the first line printed has the server, its model and the whole context,
        which nobody has set."""
        (model,) = self._server.client.get("/v1/models").json()["data"]
        context = min(model["context_length"], model["max_prompt_tokens"])
        line = f"{self.agent.name}: {MODEL} at {url}, {context} tokens"
        return line in printed.splitlines() and context > _LEAST_CONTEXT

    def _outcome(self, requests: Sequence[Request], trouble: str) -> Outcome:
        metric, before = self._server.metric, -1.0
        while before != (before := metric("mlx_lm_server_prompt_tokens_total")):
            time.sleep(2)  # engines tell their counts once a second
        return Outcome(
            version(self.agent, self._found),
            sorted({each.path for each in requests}),
            len(requests),
            int(metric("mlx_lm_server_prompt_tokens_total")),
            int(metric("mlx_lm_server_cached_ram_tokens_total")),
            trouble,
        )


def tool_results(body: dict[str, Any]) -> list[str]:
    """Return the texts that tell the model what its calls, or its edits, came to."""
    messages = body.get("messages") or body["input"]
    found = [m for m in messages if m.get("type") == "function_call_output"]
    found += [m for m in messages if m.get("role") == "tool"]
    for message in messages:
        if isinstance(message.get("content"), list):
            found += [c for c in message["content"] if c.get("type") == "tool_result"]
    return [str(each) for each in found or messages if each.get("role") != "assistant"]


def _length(body: dict[str, Any]) -> int:
    return len(body.get("messages") or body["input"])


def _generated(server: Server) -> float:
    return server.metric("mlx_lm_server_generated_tokens_total")


def _refused(server: Server) -> list[str]:
    lines = server.client.get("/metrics").text.splitlines()
    counted = r'mlx_lm_server_requests_total\{.*status="[45]'
    return [line for line in lines if re.match(counted, line) and not line.endswith(" 0.0")]


def _kill(process: subprocess.Popen[str]) -> None:
    """End an agent and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
