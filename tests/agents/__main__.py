"""`python -m tests.agents`: real coding agents do a task on a real server, without a network.

Each agent is installed from npm or PyPI into a directory of its own, and `mlx-lm-server agent`
starts it where that knows it. The server has no flag but its model, which acts a script
(`tests.agents.model`). All else is real: the agent's prompts and tools, the server's defaults,
templates, parsers and caches, and what the agent does to the files of a project.
"""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports MLX

from engine.model.demo import demo_model_path  # noqa: E402
from tests.agents.compaction import compact  # noqa: E402
from tests.agents.formats import FORMATS, Format  # noqa: E402
from tests.agents.installing import binaries, install  # noqa: E402
from tests.agents.model import MODEL, make_actor  # noqa: E402
from tests.agents.scripts import AGENTS, PLAIN, Agent  # noqa: E402
from tests.agents.tool_search import TOOL_SEARCHES  # noqa: E402
from tests.agents.trial import Outcome, Trial  # noqa: E402
from tests.e2e.installing import NotInstalled  # noqa: E402
from tests.e2e.server import Server, serving_alone  # noqa: E402
from tests.page_tables import write_tables  # noqa: E402

_ALONE = ("unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && "$@"')
"""Runs a command without a network but the loopback interface, where the system lets it."""
FREE_PORT = ("--port", "0")
"""The only flag of a server beside which others run."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("--only", default="", help="agents whose names match this expression")
    parser.add_argument("--keep", type=Path, help="install below this directory, and keep it")
    parser.add_argument("--write", type=Path, help="put the table into this file")
    parser.add_argument("--installed", action="store_true", help="install nothing")
    options = parser.parse_args()
    chosen = [agent for agent in AGENTS if re.search(options.only, agent.name)]
    with tempfile.TemporaryDirectory(prefix="agents-") as private:
        root = options.keep or Path(private)
        if not options.installed:
            for agent in chosen:
                try:
                    install(agent, root)
                except NotInstalled as error:
                    print(f"{agent.name} {error}")
            again = ["-m", "tests.agents", *sys.argv[1:], "--installed", "--keep", str(root)]
            return subprocess.run([*_isolation(), sys.executable, *again]).returncode
        rows = [row for agent in chosen for row in _try(agent, root, Path(private))]
    if options.write is not None:
        write_tables(options.write, {"agents": _table(rows)})
    return int(any(row.trouble for row in rows))


def _isolation() -> Sequence[str]:
    try:
        done = subprocess.run([*_ALONE, "sh", "true"], capture_output=True)
    except FileNotFoundError:
        return ()
    return () if done.returncode else (*_ALONE, "sh")


def _has_own_network() -> bool:
    """Whether nothing else can use the server's port."""
    return {name for _, name in socket.if_nameindex()} == {"lo"}


class Row(NamedTuple):
    agent: Agent
    format: Format
    outcome: Outcome
    searched: str | None
    """What went wrong with one of 60 tools. Empty: nothing; None: it was not tried."""
    compacted: str | None

    @property
    def trouble(self) -> str:
        return self.outcome.trouble or self.searched or self.compacted or ""


def _try(agent: Agent, root: Path, private: Path) -> Iterator[Row]:
    found = binaries(agent, root)
    if not (found / agent.name).exists():
        return
    flags = () if _has_own_network() else FREE_PORT
    for format in FORMATS:
        searched: str | None = None
        compacted: str | None = None
        with acting(agent, format, private, *flags) as server:
            trial = Trial(agent, found, private, server)
            outcome = trial.run()
            if agent.name in TOOL_SEARCHES:
                searched = trial.find_tool()
        if agent.name == "codex":
            compacted = compact(found, Path(tempfile.mkdtemp(dir=private)), format, *flags)
        print(
            f"{agent.name} {outcome.version}, {format.name}:"
            f" {outcome.trouble or 'does the task'}; {outcome.requests} requests,"
            f" {outcome.prompt_tokens} prompt tokens, {_cached(outcome)} of them cached;"
            f" one of 60 tools: {_result(searched)}; compaction: {_result(compacted)}",
            *filter(None, (searched, compacted)),
            flush=True,
        )
        yield Row(agent, format, outcome, searched, compacted)


@contextmanager
def acting(agent: Agent, format: Format, private: Path, *flags: str) -> Iterator[Server]:
    """Serve a model that acts the scripts of ``agent``, whose project is in ``private``, with
    nothing but the defaults and ``flags``."""
    scripts = agent.scripts(f"{private}/project")
    path = private / f"model-{agent.name}-{format.name}" / MODEL
    model = make_actor(path, demo_model_path(), scripts, PLAIN, format)
    with serving_alone(model, *flags) as server:
        yield server


def _cached(outcome: Outcome) -> str:
    return f"{outcome.cached_tokens / max(1, outcome.prompt_tokens):.0%}"


def _result(trouble: str | None) -> str:
    return "n/a" if trouble is None else "fail" if trouble else "pass"


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| agent | version | API | model's format | task | calls at once | error | killed"
        " | 60 tools | compaction | requests | cached |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for agent, format, outcome, searched, compacted in rows:
        apis = ", ".join(f"`{path}`" for path in outcome.paths)
        result = _result(outcome.trouble)
        parallel = result if format.parallel and agent.tools is not None else "n/a"
        cells = [agent.name, outcome.version, apis, format.name, result, parallel, result, result]
        cells += [_result(searched), _result(compacted)]
        lines.append(f"| {' | '.join(cells)} | {outcome.requests} | {_cached(outcome)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
