"""Examines architectures in child processes, so that one that crashes or hangs ends no run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

import msgspec

from engine.zoo.examine import ArchitectureReport, examine

TIME_LIMIT_S = 180.0


def examine_all(
    names: Iterable[str], time_limit_s: float = TIME_LIMIT_S
) -> Iterator[ArchitectureReport]:
    """What `examine` finds for each of ``names`` that is a model.

    One child does them one after the other; where it dies or takes longer than
    ``time_limit_s`` for one, a new child goes on with the next.
    """
    child: _Child | None = None
    try:
        for name in names:
            child = child or _Child()
            finding, alive = child.examine(name, time_limit_s)
            if finding is not None:
                yield finding
            if not alive:
                child.end()
                child = None
    finally:
        if child is not None:
            child.end()


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.zoo.farm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**_environment()},
        )

    def examine(self, name: str, time_limit_s: float) -> tuple[ArchitectureReport | None, bool]:
        """The finding, and whether the child may be asked again."""
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
        return ArchitectureReport(
            name=name, loads=True, error=f"the process that examined it: {how}"
        ), False

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _environment() -> dict[str, str]:
    """Ours, with the folder in which this package lies, since ``-P`` leaves it out."""
    import os
    from pathlib import Path

    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *([path] if path else [])])}


def _work() -> None:
    """Reads names, answers with findings, a line each. What models print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answers.write(msgspec.json.encode(examine(line.strip())).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    _work()
