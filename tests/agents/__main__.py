"""`python -m tests.agents`: real coding agents do a task on a real server, without a network.

Each agent is installed from npm into a folder of its own and started by `mlx-lm-server agent`. The
model acts a script (`tests.agents.model`); all else is real: the agent's prompts and tools, the
server's templates, parsers and caches, and what the agent does to the files of a project.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports MLX

from engine.model.demo import demo_model_path  # noqa: E402
from tests.agents.model import CONTEXT, make_actor  # noqa: E402
from tests.agents.scripts import AFTER, BEFORE, FINAL, PLAIN, Agent, agents  # noqa: E402
from tests.e2e.server import Server, serving  # noqa: E402

ROOT = Path(__file__).parents[2]
_INSTALL_S = 600
_TASK_S = 300


class Outcome(NamedTuple):
    """What an agent did. ``trouble`` is empty if it did the task."""

    version: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    trouble: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("--only", default="", help="agents whose names match this expression")
    parser.add_argument("--keep", type=Path, help="install below this directory, and keep it")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="agents-") as private:
        root = options.keep or Path(private)
        for agent in agents(f"{private}/project"):
            if not re.search(options.only, agent.name):
                continue
            outcome = try_agent(agent, root, Path(private))
            share = outcome.cached_tokens / max(1, outcome.prompt_tokens)
            print(
                f"{agent.name} {outcome.version}: {outcome.trouble or 'does the task'};"
                f" {outcome.requests} requests, {outcome.prompt_tokens} prompt tokens,"
                f" {share:.0%} of them cached",
                flush=True,
            )
            failed |= bool(outcome.trouble)
    return int(failed)


def try_agent(agent: Agent, root: Path, private: Path) -> Outcome:
    """Install ``agent`` below ``root`` and let it do the task in ``private``/project."""
    binaries = _install(agent, root / agent.name)
    home, project = private / f"home-{agent.name}", private / "project"
    shutil.rmtree(project, ignore_errors=True)
    for directory in (home, project):
        directory.mkdir()
    (project / "notes.txt").write_text(BEFORE)
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    model = make_actor(private / f"model-{agent.name}", demo_model_path(), agent.replies, PLAIN)
    limits = ("--max-prompt-tokens", str(CONTEXT), "--max-request-bytes", "10000000")
    with serving(model, "--served-model-name", "actor", "--no-ssd", *limits) as server:
        environment = {
            **{name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ},
            **agent.environment,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            # Nothing listens there, so that an agent reaches this server and nothing else.
            **dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9"),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
        }
        url = f"http://127.0.0.1:{server.port}"
        start = [sys.executable, "-m", "services.cli", "agent", agent.name, "--url", url]
        try:
            done = subprocess.run(
                [*start, *agent.arguments],
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TASK_S,
            )
            trouble = _trouble(done, project, server)
        except subprocess.TimeoutExpired:
            trouble = f"did not end within {_TASK_S} s"
        return _outcome(agent, binaries, server, trouble)


def _trouble(done: subprocess.CompletedProcess[str], project: Path, server: Server) -> str:
    refused = [line for line in server.log if re.search(r" (error|warning) ", line)]
    tail = "\n".join([*done.stdout.splitlines()[-20:], *refused])
    if done.returncode:
        return f"exit code {done.returncode}:\n{tail}"
    if (project / "notes.txt").read_text() != AFTER:
        return f"notes.txt is not as it should be:\n{tail}"
    return "" if FINAL in done.stdout else f"no answer:\n{tail}"


def _outcome(agent: Agent, binaries: Path, server: Server, trouble: str) -> Outcome:
    version = subprocess.run(
        [binaries / agent.name, "--version"], capture_output=True, text=True, timeout=60
    ).stdout
    found = re.search(r"\d+\.\d+\.\d+", version)
    failed = [
        line
        for line in server.client.get("/metrics").text.splitlines()
        if re.match(r'mlx_lm_server_requests_total\{.*status="[45]', line)
        and not line.endswith(" 0.0")
    ]
    return Outcome(
        found[0] if found else "?",
        int(server.metric("mlx_lm_server_requests_total")),
        int(server.metric("mlx_lm_server_prompt_tokens_total")),
        int(server.metric("mlx_lm_server_cached_ram_tokens_total")),
        trouble or "; ".join(failed),
    )


def _install(agent: Agent, directory: Path) -> Path:
    """Return the directory of the agent's command."""
    binaries = directory / "node_modules" / ".bin"
    if not (binaries / agent.name).exists():
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", agent.package],
            cwd=directory,
            check=True,
            timeout=_INSTALL_S,
        )
    return binaries


if __name__ == "__main__":
    sys.exit(main())
