"""Examines architectures in child processes, so that a crash or a hang ends no run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE, Popen

import msgspec

from engine.backend.gpu_path import forced_gpu_path
from engine.zoo.examine import ArchitectureReport, examine

TIME_LIMIT_S = 180.0
GPU_PATH = "--gpu-path"


def examine_all(
    names: Iterable[str], time_limit_s: float = TIME_LIMIT_S, *, gpu_path: bool = False
) -> Iterator[ArchitectureReport]:
    """Yield the report of `examine` for each of ``names`` that is a model.

    One child examines them one after the other, with ``gpu_path`` as on a GPU. If it dies, or
    takes longer than ``time_limit_s`` for one, a new child continues with the next.
    """
    child: _Child | None = None
    try:
        for name in names:
            child = child or _Child(gpu_path)
            report, alive = child.examine(name, time_limit_s)
            if report is not None:
                yield report
            if not alive:
                child.end()
                child = None
    finally:
        if child is not None:
            child.end()


class _Child:
    def __init__(self, gpu_path: bool) -> None:
        command = [sys.executable, "-P", "-m", "engine.zoo.farm", *[GPU_PATH] * gpu_path]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, env=_environment())

    def examine(self, name: str, time_limit_s: float) -> tuple[ArchitectureReport | None, bool]:
        """Return the report, and whether the child can be used again."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(name.encode() + b"\n")
        process.stdin.flush()
        timer = threading.Timer(time_limit_s, process.kill)
        timer.start()
        line = process.stdout.readline()
        timed_out = not timer.is_alive()
        timer.cancel()
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=ArchitectureReport | None), True
        status = process.wait()
        how = f"no answer in {time_limit_s:.0f} s" if timed_out else f"ended with {status}"
        error = f"the process that examined it: {how}"
        return ArchitectureReport(name=name, loads=True, error=error), False

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _environment() -> dict[str, str]:
    """Return our environment plus the folder of this package, which ``-P`` leaves out."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *([path] if path else [])])}


def _work() -> None:
    """Read names and write reports, a line each. What models print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answers.write(msgspec.json.encode(examine(line.strip())).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    with forced_gpu_path() if GPU_PATH in sys.argv else nullcontext():
        _work()
