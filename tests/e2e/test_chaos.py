"""The short form of `make chaos`: each kind of fault about once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.process import ROOT


@pytest.mark.slow
def test_every_answer_under_chaos_is_right_or_a_documented_error() -> None:
    command = [sys.executable, "-m", "tests.e2e.chaos", "--seconds", "35", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=420)
    print(done.stdout)  # noqa: T201
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "router replaced" in done.stdout
