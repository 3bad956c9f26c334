"""The link between a child and its supervisor."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from shared.supervisor_link import LINK_VARIABLE, LineWriter, SupervisorLink
from tests.shared.test_rundir import hold


@pytest.fixture
def pair() -> tuple[SupervisorLink, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    return SupervisorLink(ours), theirs


def test_the_descriptor_of_the_environment_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        monkeypatch.setenv(LINK_VARIABLE, str(ours.detach()))
        link = SupervisorLink.from_environment()
        assert link is not None
        assert SupervisorLink.from_environment() is None
        link.heartbeat("ready", blocks=3)
        assert json.loads(theirs.recv(1000)) == {"phase": "ready", "blocks": 3}


def test_the_rest_of_a_message_that_did_not_fit_is_sent_without_another_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        writer, received = LineWriter(ours), b""
        assert writer.write({"long": "x" * 2_000_000})
        while not received.endswith(b"\n"):
            received += theirs.recv(100_000)
            writer.flush()
        assert json.loads(received) == {"long": "x" * 2_000_000}


def test_heartbeats_never_block_and_lines_never_mix(
    pair: tuple[SupervisorLink, socket.socket],
) -> None:
    link, supervisor = pair
    padding = "x" * 5000

    def heartbeat(phase: str) -> None:
        for number in range(200):
            link.heartbeat(phase, number=number, padding=padding)

    began = time.monotonic()
    threads = [threading.Thread(target=heartbeat, args=(phase,)) for phase in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a beat waits for a reader"
    assert time.monotonic() - began < 20
    supervisor.setblocking(False)
    received = b""
    for _ in range(3):  # with room again, the line that was cut is finished first
        try:
            while data := supervisor.recv(1 << 20):
                received += data
        except BlockingIOError:
            link.heartbeat("last")
    lines = received.splitlines()
    assert len(lines) > 3
    assert all(json.loads(line)["padding"] == padding for line in lines[:-2])
    assert json.loads(lines[-1])["phase"] == "last"


def test_the_end_of_the_supervisor_is_noticed_and_its_directory_removed(tmp_path: Path) -> None:
    supervisor, run_dir = hold(tmp_path)
    ours, theirs = socket.socketpair()
    gone = threading.Event()
    SupervisorLink(ours, str(run_dir)).watch(gone.set)
    theirs.send(b"something\n")
    assert not gone.wait(0.2)
    with supervisor:
        supervisor.kill()
    theirs.close()
    assert gone.wait(60)
    assert not run_dir.exists()


def test_a_heartbeat_after_the_end_of_the_supervisor_does_nothing(
    pair: tuple[SupervisorLink, socket.socket],
) -> None:
    link, supervisor = pair
    supervisor.close()
    for _ in range(3):
        link.heartbeat("ready")
