"""The short form of `make soak`: it finds leftovers, but is too short for slow leaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.soak.__main__ import soak
from tests.e2e.soak.report import grows

MINUTES = 0.15
NUM_PROMPTS = 1
"""So few that some are repeated, even if most requests are refused for lack of memory."""
SLACK_BYTES = 64 * 2**20
"""Heaps and caches still fill up during so short a run."""


@pytest.mark.slow
def test_a_short_time_of_mixed_load_leaves_nothing_behind(tiny_model: Callable[..., Path]) -> None:
    report = soak(tiny_model("llama"), MINUTES, num_prompts=NUM_PROMPTS, slack_bytes=SLACK_BYTES)
    assert not report.findings, "\n".join(report.lines())
    assert report.counts["answers"] > 12, report.lines()
    assert report.counts["repeated answers"] > 0, report.lines()


def test_a_leak_is_growth_but_filling_up_is_not() -> None:
    megabyte = 2**20
    leak = [100 * megabyte + second * megabyte // 10 for second in range(1800)]
    fills = [min(100 + second, 300) * megabyte for second in range(1800)]
    assert grows(leak)
    assert not grows(fills)
