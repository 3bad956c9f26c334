"""The time that the event loop stands still is measured."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Histogram

from router.fleet.metrics.loop_lag import WINDOW_S, LoopLag
from tests.conftest import in_loop


@pytest.fixture
def histogram() -> Histogram:
    return Histogram("lag", "", buckets=(0.1, 1), registry=CollectorRegistry())


@in_loop
async def test_a_blocked_loop_is_noticed(histogram: Histogram) -> None:
    lag = LoopLag(histogram)
    with lag.watching():
        await asyncio.sleep(0.1)
        time.sleep(0.4)
        await asyncio.sleep(0.1)
    lag.close()
    assert 0.3 < lag.worst_s() < 5
    (family,) = histogram.collect()
    counts = {sample.labels.get("le"): sample.value for sample in family.samples}
    assert counts["+Inf"] > counts["0.1"] > 0


@in_loop
async def test_work_at_the_very_begin_of_a_request_is_measured(histogram: Histogram) -> None:
    lag = LoopLag(histogram)
    with lag.watching():
        time.sleep(0.3)
    await asyncio.sleep(0.1)
    lag.close()
    assert 0.2 < lag.worst_s() < 5


@in_loop
async def test_an_idle_server_is_not_woken(
    histogram: Histogram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.metrics.loop_lag.LINGER_S", 0.1)

    def count() -> float:
        (family,) = histogram.collect()
        return next(s.value for s in family.samples if s.name == "lag_count")

    with LoopLag(histogram).watching():
        await asyncio.sleep(0.2)
    busy = count()
    await asyncio.sleep(0.3)
    lingering = count()
    await asyncio.sleep(0.3)
    assert 0 < busy < lingering == count()


def test_the_worst_of_the_last_minute_is_forgotten_later(
    histogram: Histogram, monkeypatch: pytest.MonkeyPatch
) -> None:
    lag = LoopLag(histogram)
    assert lag.worst_s() == 0
    now = begin = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("router.fleet.metrics.loop_lag.time", clock)
    for now, late_s in ((begin, 0.5), (begin + 1, 0.1), (begin + 2, 0.3), (begin + 3, 0.2)):
        lag.observe(now, late_s)
    assert lag.worst_s() == 0.5
    now = begin + WINDOW_S + 1.5
    assert lag.worst_s() == 0.3
    lag.observe(now, 0.01)
    assert lag.worst_s() == 0.3
    now = begin + 2 * WINDOW_S + 4
    assert lag.worst_s() == 0, "nothing was measured since"
