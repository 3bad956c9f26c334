"""Tests architectures in child processes, so that a crash or a hang does not end the run."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

import msgspec

from engine.backend.gpu_path import forced_gpu_path
from engine.device import HOST_VARIABLE
from engine.parallel.group import RankGroup
from shared.network.ports import free_ports
from shared.paths import python_path
from zoo.examine import ArchitectureReport, examine

TIME_LIMIT_S = 180.0
GPU_PATH = "--gpu-path"
RANKS_VARIABLES = ("MLX_RANK", "MLX_HOSTFILE")


class Way(NamedTuple):
    """How architectures are computed."""

    gpu_path: bool = False
    """As on a GPU."""
    ranks: int = 1
    """The number of processes that compute a model together."""

    @property
    def words(self) -> str:
        between = f", {self.ranks} ranks" if self.ranks > 1 else ""
        return f"as on a {'GPU' if self.gpu_path else 'CPU'}{between}"


def examine_all(
    names: Iterable[str], time_limit_s: float = TIME_LIMIT_S, way: Way | None = None
) -> Iterator[ArchitectureReport]:
    """Yield the report of `examine` for each of ``names`` that is a model.

    One child per rank tests them one after the other. If one crashes, or exceeds ``time_limit_s``
    for one architecture, new ones continue with the next.
    """
    children: _Children | None = None
    try:
        for name in names:
            children = children or _Children(way or Way())
            report, alive = children.examine(name, time_limit_s)
            if report is not None:
                yield report
            if not alive:
                children.end()
                children = None
    finally:
        if children is not None:
            children.end()


class _Children:
    """The processes of all ranks, or the only one."""

    def __init__(self, way: Way) -> None:
        command = [sys.executable, "-P", "-m", "zoo.farm", *[GPU_PATH] * way.gpu_path]
        self._folder = tempfile.TemporaryDirectory()
        hosts = Path(self._folder.name, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(way.ranks)]))
        self._processes = []
        for rank in range(way.ranks):
            environment = {**os.environ, "PYTHONPATH": python_path()}
            if way.ranks > 1:  # a divided model stays in MLX's graph
                values = (str(rank), str(hosts))
                environment |= dict(zip(RANKS_VARIABLES, values, strict=True))
                environment[HOST_VARIABLE] = "0"
            self._processes.append(Popen(command, stdin=PIPE, stdout=PIPE, env=environment))

    def examine(self, name: str, time_limit_s: float) -> tuple[ArchitectureReport | None, bool]:
        """Return the report of the first rank, or of one that found an error; and whether the
        processes can be used again."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(name.encode() + b"\n")
            process.stdin.flush()
        timer = threading.Timer(time_limit_s, self._kill)
        timer.start()
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        timed_out = not timer.is_alive()
        timer.cancel()
        if all(line.endswith(b"\n") for line in lines):
            reports = [msgspec.json.decode(line, type=ArchitectureReport | None) for line in lines]
            wrong = [report for report in reports if report is not None and report.error]
            # A rank that raised has left the others in a different state.
            return (wrong or reports)[0], not wrong or len(reports) == 1
        self._kill()
        codes = " and ".join(str(process.wait()) for process in self._processes)
        how = f"no answer in {time_limit_s:.0f} s" if timed_out else f"ended with {codes}"
        error = f"the process that examined it: {how}"
        return ArchitectureReport(name=name, loads=True, error=error), False

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        self._kill()
        for process in self._processes:
            process.communicate()
        self._folder.cleanup()


def _work() -> None:
    """Read names and write reports, a line each. What models print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    group = RankGroup.join() if all(name in os.environ for name in RANKS_VARIABLES) else None
    for line in sys.stdin:
        answers.write(msgspec.json.encode(examine(line.strip(), group=group)).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    with forced_gpu_path() if GPU_PATH in sys.argv else nullcontext():
        _work()
