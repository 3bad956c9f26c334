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
PATIENCE_S = 40.0


def spec(name: str, spare: str = SPARE) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", CHILD, name, "--flag"),
        environment={"NAME": name},
        spare=(sys.executable, "-c", spare),
    )


@pytest.fixture
def started() -> Iterator[list[LocalProcess]]:
    processes: list[LocalProcess] = []
    yield processes
    for process in processes:
        process.end()


def facts(process: LocalProcess) -> Any:
    """Return what the child says of itself."""
    deadline = time.monotonic() + PATIENCE_S
    while process.state.phase != "ready":
        assert time.monotonic() < deadline
        process.refresh(time.monotonic())
        time.sleep(0.01)
    return process.state.facts


def test_a_spare_process_becomes_the_next_child(started: list[LocalProcess]) -> None:
    launcher = LocalLauncher(LogCollector("text", io.StringIO()), spare_after_s=10)
    started.append(launcher.start(spec("a"), now=100.0))
    launcher.keep_spare(109.0)
    assert launcher.spare_pid is None
    launcher.keep_spare(110.0)
    spare = launcher.spare_pid
    launcher.keep_spare(111.0)
    assert spare is not None and launcher.spare_pid == spare
    started.append(launcher.start(spec("b"), now=112.0))
    found = facts(started[1])
    assert (found["pid"], found["words"], found["name"]) == (spare, ["b", "--flag"], "b")
    assert started[1].spec.name == "b"
    assert facts(started[0])["pid"] != spare
    launcher.keep_spare(121.0)
    assert launcher.spare_pid is None  # the next one is due ten seconds after this start


def test_without_a_thread_for_its_output_a_child_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = LocalLauncher(LogCollector("text", io.StringIO()), spare_after_s=0)
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
        launcher.start(spec("a"), now=100.0)
    assert children[0].returncode == -signal.SIGKILL


def test_a_stopped_spare_process_becomes_the_next_child(started: list[LocalProcess]) -> None:
    launcher = LocalLauncher(LogCollector("text", io.StringIO()), spare_after_s=10)
    started.append(launcher.start(spec("a"), now=100.0))
    launcher.keep_spare(110.0)
    spare = launcher.spare_pid
    assert spare is not None
    os.kill(spare, signal.SIGSTOP)
    started.append(launcher.start(spec("b"), now=112.0))
    assert facts(started[1])["pid"] == spare


def test_a_spare_that_has_ended_is_not_used(started: list[LocalProcess]) -> None:
    launcher = LocalLauncher(LogCollector("text", io.StringIO()), spare_after_s=10)
    broken = spec("a", spare="raise SystemExit(1)")
    started.append(launcher.start(broken, now=100.0))
    launcher.keep_spare(110.0)
    pid = launcher.spare_pid
    assert pid is not None
    deadline = time.monotonic() + PATIENCE_S
    while launcher.spare_pid is not None:
        assert time.monotonic() < deadline
        launcher.keep_spare(111.0)
    launcher.keep_spare(170.0)
    assert launcher.spare_pid is None  # it would end again
    started.append(launcher.start(broken, now=171.0))
    assert facts(started[1])["words"] == ["a", "--flag"]


def test_no_spare_is_left_at_the_end(started: list[LocalProcess]) -> None:
    launcher = LocalLauncher(LogCollector("text", io.StringIO()), spare_after_s=10)
    started.append(launcher.start(spec("a"), now=100.0))
    launcher.keep_spare(110.0)
    pid = launcher.spare_pid
    assert pid is not None and is_running(pid)
    launcher.close()
    with pytest.raises(ProcessLookupError):  # nobody has to wait for it any more
        os.kill(pid, 0)


@pytest.mark.parametrize("after_s", [0.0, 10.0])
def test_only_children_that_may_have_a_spare_get_one(
    started: list[LocalProcess], after_s: float
) -> None:
    """``0`` means that the server wants none."""
    launcher = LocalLauncher(LogCollector("text", io.StringIO()), spare_after_s=after_s)
    kind = replace(spec("a"), spare=()) if after_s else spec("a")
    started.append(launcher.start(kind, now=100.0))
    launcher.keep_spare(1000.0)
    assert launcher.spare_pid is None
