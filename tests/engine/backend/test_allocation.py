import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backend import allocation

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

PROGRAM = """
import mlx.core as mx
arrays = [mx.zeros((3, 2**18)) for _ in range(32)]  # 3 MB each
mx.eval(arrays)
rollup = open("/proc/self/smaps_rollup").read().split()
print(rollup[rollup.index("AnonHugePages:") + 1])
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not HUGE.exists() or "[never]" in HUGE.read_text(),
    reason="this system has no huge pages",
)
def test_large_arrays_come_in_huge_pages() -> None:
    environment = {**os.environ, **allocation.environment({})}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert int(run.stdout) > 48_000  # KB


def test_tunables_that_the_user_set_are_kept() -> None:
    assert "GLIBC_TUNABLES" not in allocation.environment({"GLIBC_TUNABLES": "glibc.malloc.x=1"})


def test_mlx_submits_less_often_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of pages count as a whole, however little of them a step uses."""
    monkeypatch.setattr(sys, "platform", "linux")
    assert "MLX_MAX_MB_PER_BUFFER" not in allocation.environment({})
    monkeypatch.setattr(sys, "platform", "darwin")
    assert allocation.environment({})["MLX_MAX_MB_PER_BUFFER"] == "256"
    given = {"MLX_MAX_MB_PER_BUFFER": "50"}
    assert "MLX_MAX_MB_PER_BUFFER" not in allocation.environment(given)


def test_containers_set_the_same_tunables() -> None:
    dockerfile = Path(__file__).parents[3] / "deploy" / "Dockerfile"
    value = allocation.environment({})[allocation.VARIABLE]
    assert f"ENV {allocation.VARIABLE}={value}\n" in dockerfile.read_text()
