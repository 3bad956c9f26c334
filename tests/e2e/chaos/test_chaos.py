"""The short form of `make chaos`: some of its faults."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.e2e.process import ROOT

OPTIONS = ("--seconds=8", "--seed=1", "--pace=3", "--fault-pace=0.3")
PATIENCE_S = 550
KINDS = (
    *("killed", "hung", "stopped", "router replaced", "sockets cut", "sockets silent"),
    *("store removed", "other machine lost", "second router killed", "restarted"),
)
"""Those that every machine allows."""
PROGRESS = (
    r"^\d\.\d min: \d+ answers, \d+ of them whole and right, \d+ faults, 0 wrong;"
    r" MB: .*\bsupervisor \d+"
)


@pytest.mark.slow
def test_every_answer_under_chaos_is_right_or_a_documented_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.chaos", *OPTIONS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate(timeout=60)
        pytest.fail(f"still running after {PATIENCE_S} s:\n{printed[-6000:]}")
    finally:
        if process.poll() is None:  # supervisors are in its group, and their children end with them
            os.killpg(process.pid, signal.SIGKILL)
    print(printed)  # noqa: T201
    assert process.returncode == 0, printed[-6000:]
    for kind in KINDS:
        assert re.search(rf"^(\S.*)?\b{kind}\b.* +[1-9]\d* ", printed, re.MULTILINE), kind
    assert re.search(PROGRESS, printed, re.MULTILINE), "a line at the end of the faults"
