"""The limit of descriptors."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shared import descriptors

ROOT = Path(__file__).parents[2]
PROGRAM = """
import resource
from shared.descriptors import raise_descriptor_limit
print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("hard", [512, 20_000])
def test_the_limit_is_raised_to_what_is_allowed(hard: int) -> None:
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this machine allows fewer descriptors")
    shell = f"ulimit -Sn 256 && ulimit -Hn {hard} && exec {sys.executable} -c '{PROGRAM}'"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [str(hard)] * 3, done.stderr


def test_a_mac_gets_what_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, resource.RLIM_INFINITY)]

    def set_limit(_: int, new: tuple[int, int]) -> None:
        if new[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(new)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert descriptors.raise_descriptor_limit() == 10_240
    assert limits[-1] == (10_240, resource.RLIM_INFINITY)
    assert descriptors.raise_descriptor_limit() == 10_240
