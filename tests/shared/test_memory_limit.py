"""What a client asks for ends within its memory limit, on systems that enforce one and others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.exits import EXIT_FAILED

MB = 2**20
PROGRAM = f"""
import sys, time
from shared.sandbox.memory_limit import MemoryLimit, exit_beyond, used_bytes

def use(megabytes):
    used = b"x" * (megabytes * {MB})
    time.sleep(1)

"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_process_that_uses_too_much_ends() -> None:
    limited = f"with exit_beyond(used_bytes() + 100 * {MB}): use(%d)\nprint('whole')"
    assert run(limited % 10).stdout == "whole\n"
    ended = run(limited % 300)
    assert (ended.returncode, ended.stdout) == (EXIT_FAILED, "")
    assert run(f"with exit_beyond(used_bytes() + {MB}): pass\nuse(300)").returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot refuse allocations")
def test_allocations_beyond_the_limit_are_refused() -> None:
    program = f"""
limit = MemoryLimit(200 * {MB})
with limit.applied():
    try: use(300)
    except MemoryError: print("refused")
    use(10)
use(300)
print("whole")
"""
    assert run(program).stdout == "refused\nwhole\n"
