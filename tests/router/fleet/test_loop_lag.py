"""The time that the event loop stands still is measured."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry, Histogram

from router.fleet.loop_lag import WINDOW_S, LoopLag


@pytest.fixture
def histogram() -> Histogram:
    return Histogram("lag", "", buckets=(0.1, 1), registry=CollectorRegistry())


def test_a_blocked_loop_is_noticed(histogram: Histogram) -> None:
    lag = LoopLag(histogram)

    async def test() -> None:
        measuring = asyncio.create_task(lag.run())
        await asyncio.sleep(0.1)
        time.sleep(0.4)
        await asyncio.sleep(0.1)
        measuring.cancel()

    asyncio.run(test())
    assert 0.3 < lag.worst_s() < 5
    (family,) = histogram.collect()
    counts = {sample.labels.get("le"): sample.value for sample in family.samples}
    assert counts["+Inf"] > counts["0.1"] > 0


def test_the_worst_of_the_last_minute_is_forgotten_later(histogram: Histogram) -> None:
    lag = LoopLag(histogram)
    assert lag.worst_s() == 0
    for now, late_s in ((0.0, 0.5), (1.0, 0.1), (2.0, 0.3), (3.0, 0.2)):
        lag.observe(now, late_s)
    assert lag.worst_s() == 0.5
    lag.observe(WINDOW_S + 1.5, 0.01)
    assert lag.worst_s() == 0.3
    lag.observe(2 * WINDOW_S + 4, 0.01)
    assert lag.worst_s() == 0.01
