"""The histogram of what happens at each token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.fleet.metrics import LoopHistogram


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
