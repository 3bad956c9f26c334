"""The supervisor, with real processes as children."""

from __future__ import annotations

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from services.supervision.launcher import ChildSpec
from services.supervision.managed_child import Limits, ManagedChild, describe_exit
from shared.exits import EXIT_CONFIG, EXIT_OK
from tests.conftest import eventually
from tests.e2e.server import cpu_s, is_running, ps

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


class Entry(NamedTuple):
    event: str
    name: str
    pid: int
    at: float


@dataclass
class Server:
    """A running supervisor, and the journal of its children."""

    process: subprocess.Popen[str]
    folder: Path

    def journal(self, event: str = "start") -> list[Entry]:
        try:
            lines = (self.folder / "journal").read_text().splitlines()
        except FileNotFoundError:
            return []
        entries = [Entry(a, b, int(c), float(d)) for a, b, c, d in map(str.split, lines)]
        return [entry for entry in entries if entry.event == event]

    def wait_for_starts(self, number: int) -> list[Entry]:
        eventually(lambda: len(self.journal()) >= number)
        return self.journal()

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line
        self.run_dir = Path(line.removeprefix("ready ").strip())

    def child(self, name: str) -> Entry:
        return next(entry for entry in self.journal() if entry.name == name)

    def stop(self) -> tuple[int, str, str]:
        """Send SIGTERM, and return what `end` does."""
        self.process.terminate()
        return self.end()

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return the exit code, the rest of stdout, and stderr."""
        out, error = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, error


Start = Callable[..., Server]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def begin(*children: str, **limits: float) -> Server:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.services.supervised"),
                *(str(tmp_path), json.dumps(limits), *children),
            ],
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        servers.append(Server(process, tmp_path))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.kill()
        server.process.communicate(timeout=PATIENCE_S)
        for entry in server.journal():
            wait_until_gone(entry.pid)


@pytest.fixture
def start(begin: Start) -> Start:
    """Return a function that begins a server, and waits until it is ready."""

    def start(*children: str, **limits: float) -> Server:
        server = begin(*children, **limits)
        server.wait_until_ready()
        return server

    return start


def wait_until_gone(pid: int) -> None:
    eventually(lambda: not is_running(pid))


def test_every_signal_that_ends_a_child_has_a_name() -> None:
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"  # of those for real time, without a name


def test_a_killed_child_leaves_no_stopped_process_of_its_group(begin: Start) -> None:
    server = begin("engine:helped:0")
    (child,) = server.wait_for_starts(1)
    eventually(lambda: len(server.journal("helper")) == 1)
    (helper,) = server.journal("helper")
    os.kill(child.pid, signal.SIGKILL)
    server.wait_for_starts(2)
    wait_until_gone(helper.pid)


def test_pauses_before_restarts_grow_while_a_child_keeps_failing(begin: Start) -> None:
    server = begin("a:ready-then-crash:0", backoff_s=0.2)
    times = [entry.at for entry in server.wait_for_starts(5)]
    gaps = [late - early for early, late in itertools.pairwise(times)]
    for number, gap in enumerate(gaps):
        assert gap >= 0.2 * 2**number


def test_time_that_a_child_was_ready_forgives_earlier_failures() -> None:
    child = ManagedChild(ChildSpec(name="a", command=()))
    limits = Limits(forgiving_s=2.0)
    child.failures = 5
    child.forget_failures(limits, 1000.0)  # it was never ready
    assert child.failures == 5
    child.ready_at = 1000.0
    child.forget_failures(limits, 1005.0)
    assert child.failures == 3 and child.ready_at is None
    child.ready_at = 2000.0
    child.forget_failures(limits, 2600.0)
    assert child.failures == 0


def test_a_child_whose_work_another_takes_over_leaves_it_the_processor_for_a_while(
    start: Start,
) -> None:
    server = start("a:serve:0:same", "b:serve:0:same", "c:serve:0:other", beside_others_s=1.0)
    for number, name in enumerate("ac", 1):
        victim = server.child(name)
        killed_at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        started = server.wait_for_starts(3 + number)[-1]
        assert started.name == name
        if name == "a":
            assert started.at >= killed_at + 1.0
    assert sorted(entry.name for entry in server.journal()) == [*"aabcc"]
    code, rest, log = server.stop()
    assert code == EXIT_OK
    assert rest == "", "ready was announced twice"
    assert "warning supervisor: a was killed by SIGKILL; restarting it in 1.0 s" in log
    assert "c was killed by SIGKILL; restarting it in 0.1 s" in log


def test_a_stopped_child_ends_by_itself_when_it_is_told_to(start: Start) -> None:
    server = start("a:serve:0")
    os.kill(server.child("a").pid, signal.SIGSTOP)
    code, _, log = server.stop()
    assert code == EXIT_OK and "killed" not in log
    assert [entry.name for entry in server.journal("end")] == ["a"]


def test_a_child_that_never_heartbeats_is_killed_after_a_longer_time(begin: Start) -> None:
    server = begin("a:mute:0", silence_s=0.5, loading_s=0.5, first_heartbeat_s=3)
    first, second = server.wait_for_starts(2)[:2]
    assert second.at - first.at > 2


def test_a_supervisor_that_was_suspended_does_not_kill_its_children(start: Start) -> None:
    server = start("a:serve:0", silence_s=1.5)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    server.process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert len(server.journal()) == 1


def test_a_killed_supervisor_leaves_no_run_directory_and_no_child_not_even_a_stopped_one(
    start: Start,
) -> None:
    server = start("a:serve:0", "b:stubborn:1", "c:serve:2")
    assert server.run_dir.is_dir()
    (server.run_dir / "socket").touch()
    stopped = server.child("c").pid
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: ps("-o", "stat=", "-p", str(stopped)).startswith("T"))
    server.process.kill()
    for entry in server.journal():
        wait_until_gone(entry.pid)
    eventually(lambda: not server.run_dir.exists())


def test_children_stop_stage_by_stage_but_not_at_a_hang_up(start: Start) -> None:
    server = start("store:serve:2", "engine:serve:1", "router:serve:0")
    server.process.send_signal(signal.SIGHUP)  # goes to the router, and nothing ends
    eventually(lambda: [entry.name for entry in server.journal("hangup")] == ["router"])
    assert server.process.poll() is None and not server.journal("end")
    server.process.send_signal(signal.SIGINT)
    code, _, _ = server.end()
    assert code == EXIT_OK
    ends = server.journal("end")
    assert [entry.name for entry in ends] == ["router", "engine", "store"]
    assert ends[1].at - ends[0].at > 0.25, "the next stage began before the first was over"
    assert not server.run_dir.exists()


def test_a_child_that_does_not_stop_in_time_is_killed_and_waiting_for_it_takes_no_processor(
    start: Start,
) -> None:
    server = start("a:serve:0", "b:stubborn:0", drain_timeout_s=4)
    server.process.terminate()
    eventually(lambda: bool(server.journal("end")))
    if sys.platform == "linux":  # reads /proc
        before_s = cpu_s(server.process.pid)
        time.sleep(1)
        assert cpu_s(server.process.pid) - before_s < 0.5
    code, _, log = server.end()
    assert code == EXIT_OK
    assert "b did not exit in time: killed" in log and "a did not" not in log


def test_a_second_signal_ends_the_server_at_once(start: Start) -> None:
    server = start("a:stubborn:0")
    server.process.terminate()
    time.sleep(0.5)
    assert server.process.poll() is None, "the supervisor did not wait for its child"
    code, _, _ = server.stop()
    assert code == 128 + signal.SIGTERM
    assert not is_running(server.journal()[0].pid)


def test_a_closed_terminal_ends_the_server(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover (the child)
        os.environ["XDG_RUNTIME_DIR"] = str(tmp_path)
        os.chdir(ROOT)
        program = (sys.executable, "-m", "tests.services.supervised")
        os.execv(sys.executable, [*program, str(tmp_path), "{}", "router:serve:0"])
    said = b""
    while b"ready " not in said:  # log lines may come before it
        said += os.read(terminal, 1000)
    os.close(terminal)
    eventually(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid)
    journal = (tmp_path / "journal").read_text()
    assert "end router" in journal and "hangup" not in journal


def test_a_permanent_error_at_start_ends_the_server_and_is_logged(begin: Start) -> None:
    server = begin("a:refuse:0", "b:serve:0")
    code, out, log = server.end()
    assert code == EXIT_CONFIG
    assert out == ""
    assert "a: no such model: nonsense" in log
    assert all(not is_running(entry.pid) for entry in server.journal())
    assert sum(entry.name == "a" for entry in server.journal()) == 1


def test_a_child_that_was_ready_is_restarted_after_a_permanent_error(begin: Start) -> None:
    server = begin("a:refuse-later:0")
    assert len(server.wait_for_starts(3)) >= 3
    assert server.process.poll() is None


def test_a_child_that_never_becomes_ready_ends_the_server(begin: Start) -> None:
    server = begin("a:crash:0", backoff_s=0.01, max_start_failures=3)
    code, _, log = server.end()
    assert code == 1
    assert "a exited with code 3 at every start, so the server stops" in log
    assert len(server.journal()) == 3


def test_a_child_that_others_can_do_without_is_tried_again_after_a_pause(begin: Start) -> None:
    server = begin("a:refuse:0:spared", "b:serve:0", try_again_s=0.05)
    eventually(lambda: sum(entry.name == "a" for entry in server.journal()) >= 3)
    _, _, log = server.stop()
    assert "a cannot start (exited with code 78); trying again in 0 s" in log


def test_a_child_keeps_running_while_the_log_is_not_read(begin: Start) -> None:
    server = begin("a:chatty:0")
    eventually(lambda: bool(server.journal("written")))
    server.wait_until_ready()
    _, _, log = server.stop()
    assert " info a: line 0 x" in log
    assert "lines were dropped" in log


def test_a_closed_log_does_not_end_the_server(start: Start) -> None:
    server = start("a:serve:0")
    assert server.process.stderr is not None
    server.process.stderr.close()
    for number in (1, 2):
        os.kill(server.journal()[-1].pid, signal.SIGKILL)
        server.wait_for_starts(number + 1)
    assert server.process.poll() is None
