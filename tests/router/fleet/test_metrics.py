"""Metrics for Prometheus: those of engines, and the histogram of what happens at each token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from router.fleet.metrics.prometheus import LoopHistogram
from shared.wire import EngineStats
from tests.router.conftest import StartServer, eventually


def test_figures_of_heartbeats_are_exported(start_server: StartServer) -> None:
    server = start_server()
    engine = server.join("hello", name="one")
    labels = '{engine="one",model="tiny"}'
    engine.behaviour.stats = EngineStats(
        prefill_passes_total=3, prefill_stretches_total=12, open_passes=3
    )
    eventually(lambda: f"mlx_lm_server_open_passes{labels} 3.0" in server.metrics)
    assert f"mlx_lm_server_prefill_stretches_total{labels} 12.0" in server.metrics
    assert f"mlx_lm_server_prefill_passes_total{labels} 3.0" in server.metrics


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
