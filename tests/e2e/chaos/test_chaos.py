"""The short form of `make chaos`: some of its faults."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.e2e.chaos.load import Judge
from tests.e2e.chaos.progress import print_progress
from tests.e2e.process import ROOT

SECONDS = 15
PATIENCE_S = 550


def test_progress_is_a_line_each_time_with_the_memory_of_what_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    judge, roles = Judge(), ("router", "image decoder")
    judge.outcomes.update(right=2, cancelled=1)
    until = time.monotonic() + 0.5

    def pids(role: str) -> list[int]:
        return [os.getpid()] if role == "router" else []

    asyncio.run(print_progress(until, judge, Counter(kill=3), roles, pids, every_s=0.2))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    for line in lines:
        assert re.fullmatch(
            r"0\.0 min: 3 answers, 2 of them whole and right, 3 faults, 0 wrong; MB: router \d+",
            line,
        )


@pytest.mark.slow
def test_every_answer_under_chaos_is_right_or_a_documented_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.chaos", "--seconds", str(SECONDS), "--seed", "1"],
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
    faults = re.search(r"^(\d+) faults$", printed, re.MULTILINE)
    assert faults is not None and int(faults[1]) >= 3
    progress = re.findall(
        r"^\d+\.\d min: \d+ answers, .* faults, 0 wrong; MB: router \d+, ", printed, re.MULTILINE
    )
    assert progress, "the last line of progress stands at the end of the faults"
