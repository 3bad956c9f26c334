"""A Mac stays awake while requests run. Here the command that does it is a script."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from services.processes.awake import RELEASE_S, Awake
from tests.conftest import eventually
from tests.e2e.server import is_running


class Machine:
    """A clock, and the process of each start of a command that runs until it is ended."""

    def __init__(self, folder: Path) -> None:
        self.now_s, self._log = 100.0, folder / "log"
        script = folder / "caffeinate"
        script.write_text(f"#!/bin/sh\necho $$ $1 >> {self._log}\nexec sleep 600\n")
        script.chmod(0o755)
        self.awake = Awake([str(script)], lambda: self.now_s)

    def starts(self, count: int) -> list[tuple[int, int]]:
        """Wait until there were ``count`` starts. Return the number of each process, and its
        argument."""
        eventually(lambda: len(self._lines()) >= count)
        lines = self._lines()
        assert len(lines) == count
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines]

    def _lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


def test_it_stays_awake_from_the_first_request_until_a_while_after_the_last(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path)
    machine.awake.update(False)
    for _ in range(3):
        machine.awake.update(True)
        machine.now_s += 1
    ((pid, argument),) = machine.starts(1)
    assert argument == os.getpid(), "it ends with this process, even if that is killed"
    machine.awake.update(False)
    machine.now_s += RELEASE_S - 2
    machine.awake.update(False)
    assert is_running(pid)
    machine.now_s += 2
    machine.awake.update(False)
    assert not is_running(pid)
    machine.awake.update(True)
    (_, (second, _)) = machine.starts(2)
    machine.awake.close()
    assert not is_running(second)


def test_a_missing_command_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Awake([str(tmp_path / "nothing")])
    one.update(True)
    one.update(True)
    one.close()
    assert len(caplog.records) == 1 and "may go to sleep" in caplog.text


def test_only_a_mac_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sys.platform == "darwin" or Awake.here() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Awake.here() is not None
