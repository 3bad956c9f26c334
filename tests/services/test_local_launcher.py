"""Spare processes, with real processes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from services.supervision.launcher import ChildSpec
from services.supervision.local_launcher import LocalLauncher, LocalProcess
from services.supervision.output import LogCollector
from tests.conftest import eventually
from tests.e2e.server import is_running

CHILD = (
    "import json, os, sys, time; from shared.supervisor_link import SupervisorLink;"
    "SupervisorLink.from_environment().heartbeat('ready', pid=os.getpid(), words=sys.argv[1:],"
    " name=os.environ['NAME']); time.sleep(600)"
)
SPARE = (
    "import json, os, sys; link = os.environ['_MLX_LM_SERVER_LINK_FD'];"
    "order = json.loads(os.read(int(link), 65536)); os.environ.update(order['environment']);"
    f"os.execv(sys.executable, [sys.executable, '-c', {CHILD!r}, *order['arguments']])"
)


def spec(name: str, spare: str = SPARE) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", CHILD, name, "--flag"),
        environment={"NAME": name},
        spare=(sys.executable, "-c", spare),
    )


class Launches:
    """A launcher that has a spare process ten seconds after a start, and what it has started."""

    def __init__(self) -> None:
        self.launcher = LocalLauncher(LogCollector("text", io.StringIO()), spare_after_s=10)
        self.started: list[LocalProcess] = []

    def start(self, spec: ChildSpec, now: float) -> LocalProcess:
        self.started.append(self.launcher.start(spec, now=now))
        return self.started[-1]

    def spare(self, now: float) -> int | None:
        """Return the spare process that there is from a time on."""
        self.launcher.keep_spare(now)
        return self.launcher.spare_pid


@pytest.fixture
def launches() -> Iterator[Launches]:
    made = Launches()
    yield made
    for process in made.started:
        process.end()


def facts(process: LocalProcess) -> Any:
    """Return what the child says of itself."""

    def is_ready() -> bool:
        process.refresh(time.monotonic())
        return process.state.phase == "ready"

    eventually(is_ready)
    return process.state.facts


def test_a_spare_process_becomes_the_next_child(launches: Launches) -> None:
    first = launches.start(spec("a"), now=100.0)
    assert launches.spare(109.0) is None
    spare = launches.spare(110.0)
    assert spare is not None and launches.spare(111.0) == spare
    second = launches.start(spec("b"), now=112.0)
    found = facts(second)
    assert (found["pid"], found["words"], found["name"]) == (spare, ["b", "--flag"], "b")
    assert second.spec.name == "b"
    assert facts(first)["pid"] != spare
    assert launches.spare(121.0) is None, "the next one is due ten seconds after this start"


def test_without_a_thread_for_its_output_a_child_is_not_started(
    monkeypatch: pytest.MonkeyPatch, launches: Launches
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: Any, **fields: Any) -> subprocess.Popen[bytes]:
        children.append(start(*arguments, **fields))
        return children[0]

    def no_thread(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("threading.Thread.start", no_thread)
    with pytest.raises(OSError, match="can't start new thread"):
        launches.start(spec("a"), now=100.0)
    assert children[0].returncode == -signal.SIGKILL


def test_a_stopped_spare_process_becomes_the_next_child(launches: Launches) -> None:
    launches.start(spec("a"), now=100.0)
    spare = launches.spare(110.0)
    assert spare is not None
    os.kill(spare, signal.SIGSTOP)
    assert facts(launches.start(spec("b"), now=112.0))["pid"] == spare


def test_a_spare_that_has_ended_is_not_used(launches: Launches) -> None:
    broken = spec("a", spare="raise SystemExit(1)")
    launches.start(broken, now=100.0)
    assert launches.spare(110.0) is not None
    eventually(lambda: launches.spare(111.0) is None)
    assert launches.spare(170.0) is None, "it would end again"
    assert facts(launches.start(broken, now=171.0))["words"] == ["a", "--flag"]


def test_no_spare_is_left_at_the_end(launches: Launches) -> None:
    launches.start(spec("a"), now=100.0)
    pid = launches.spare(110.0)
    assert pid is not None and is_running(pid)
    launches.launcher.close()
    with pytest.raises(ProcessLookupError):  # nobody has to wait for it any more
        os.kill(pid, 0)


@pytest.mark.parametrize("by", ["its child", "its server"])
def test_no_spare_is_started_where_none_is_wanted(launches: Launches, by: str) -> None:
    if by == "its server":
        launches.launcher = LocalLauncher(LogCollector("text", io.StringIO()), spare_after_s=0.0)
    launches.start(replace(spec("a"), spare=()) if by == "its child" else spec("a"), now=100.0)
    assert launches.spare(1000.0) is None
