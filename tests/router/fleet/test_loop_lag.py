"""The time that the event loop stands still, and the histogram of what happens at each token."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.fleet.metrics.loop_lag import WINDOW_S, LoopLag
from router.fleet.metrics.prometheus import LoopHistogram
from tests.conftest import in_loop


@pytest.fixture
def histogram() -> Histogram:
    return Histogram("lag", "", buckets=(0.1, 1), registry=CollectorRegistry())


def test_a_loop_histogram_reads_as_one_of_prometheus() -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    one = LoopHistogram("x_seconds", "Help", (0.1, 1, 2.5))
    own.register(one)
    other = Histogram("x_seconds", "Help", ["model"], buckets=(0.1, 1, 2.5), registry=theirs)
    for value in (0.05, 0.1, 0.11, 1, 2.6, 100):
        for model in ("a", "b") if value > 1 else ("a",):
            one.labels(model).observe(value)
            other.labels(model).observe(value)
    created = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(own).splitlines() == created


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
async def test_an_idle_server_sleeps(histogram: Histogram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.metrics.loop_lag.LINGER_S", 0.1)
    counts = []
    with LoopLag(histogram).watching():
        await asyncio.sleep(0.2)
    for pause_s in (0, 0.3, 0.3):
        await asyncio.sleep(pause_s)
        (family,) = histogram.collect()
        counts.append(next(s.value for s in family.samples if s.name == "lag_count"))
    busy, lingering, idle = counts
    assert 0 < busy < lingering == idle


def test_the_worst_is_forgotten(histogram: Histogram, monkeypatch: pytest.MonkeyPatch) -> None:
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
