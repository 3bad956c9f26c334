"""The metrics for Prometheus: the router's own, and those of engines from their heartbeats."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.fleet.engines.engine import Engine, ModelReplicas
from router.fleet.metrics.recent import Recent
from router.images.metrics import ImageMetrics
from shared.wire import TENSOR_PARALLEL, DraftStats, StoreState

_PREFIX = "mlx_lm_server_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 5, 10)

_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

_ENGINE_COUNTERS = {
    "steps": ("steps_total", "Steps that the engine has run"),
    "step_seconds": ("step_seconds_total", "Time spent in steps"),
    "schedule_seconds": ("schedule_seconds_total", "Host time spent planning steps"),
    "build_seconds": ("build_seconds_total", "Host time spent building steps"),
    "sample_seconds": ("sample_seconds_total", "Host time spent sampling"),
    "emit_seconds": ("emit_seconds_total", "Host time spent sending tokens"),
    "batch_rows": ("batch_rows_total", "Rows of all decode steps"),
    "prompt_tokens": ("prompt_tokens_total", "Tokens of prompts"),
    "prefill_tokens": ("prefill_tokens_total", "Tokens of prompts that were computed"),
    "prefill_passes": (
        "prefill_passes_total",
        "Passes over chunks of prompts, each through all layers",
    ),
    "prefill_stretches": (
        "prefill_stretches_total",
        "Stretches of layers that passes of chunks were cut into",
    ),
    "cached_ram_tokens": ("cached_ram_tokens_total", "Tokens of prompts found in RAM"),
    "cached_ssd_tokens": ("cached_ssd_tokens_total", "Tokens of prompts found on SSD"),
    "generated_tokens": ("generated_tokens_total", "Tokens generated"),
    "adapter_swaps": ("adapter_swaps_total", "Adapters that replaced another in memory"),
    "texts": ("texts_total", "Texts to embed, and pairs to score"),
    "shared_texts": ("shared_texts_total", "Texts equal to one in flight, computed with it"),
    "images": ("images_total", "Images in prompts"),
    "image_hits": ("image_hits_total", "Images that were not encoded for their request"),
    "encoded_images": ("encoded_images_total", "Images that were encoded"),
    "image_encoding_seconds": ("encode_seconds_total", "Time of vision encoders"),
    "preemptions": (
        "preemptions_total",
        "Sequences preempted for lack of memory, or for other requests",
    ),
    "engine_aborts": ("aborts_total", "Requests aborted at engines"),
    "engine_dropped_messages": ("dropped_messages_total", "Invalid messages at an engine"),
    "store_reads": ("store_reads_total", "Blocks read from the KV store"),
    "store_writes": ("store_writes_total", "Blocks written to the KV store"),
    "store_drops": ("store_drops_total", "Blocks that the KV store did not accept"),
    "store_corrupt": ("store_corrupt_total", "Damaged blocks found"),
    "store_read_bytes": ("store_read_bytes_total", "Bytes read from the KV store"),
    "store_written_bytes": ("store_written_bytes_total", "Bytes written to the KV store"),
}
"""By name, without prefix and ``_total``: the field of `EngineStats`, and the help."""

_ENGINE_GAUGES = {
    "active_sequences": ("running", "Sequences in the engine's batch"),
    "used_blocks": ("used_blocks", "KV cache blocks in use"),
    "free_blocks": ("free_blocks", "KV cache blocks free"),
    f"{_PREFIX}engine_waiting_sequences": ("waiting", "Sequences queued in the engine"),
    f"{_PREFIX}kv_limit_bytes": ("limit_bytes", "Limit of the engine's memory ledger"),
    f"{_PREFIX}kv_unevictable_bytes": ("unevictable_bytes", "Bytes held by running sequences"),
    f"{_PREFIX}kept_states": ("kept_states", "Kept states of recurrent layers"),
    f"{_PREFIX}adapters_loaded": ("adapters_loaded", "Adapters whose weights are in memory"),
    f"{_PREFIX}open_passes": ("open_passes", "Passes of chunks with layers still to compute"),
    f"{_PREFIX}active_memory_bytes": ("active_memory_bytes", "Memory MLX has in use"),
}

_STORE_GAUGES = {
    "store_blocks": ("blocks", "Blocks and states on SSD"),
    "store_bytes": ("bytes", "Bytes of blocks and states on SSD"),
    "store_limit_bytes": ("limit_bytes", "Current size limit on SSD in bytes (0: no limit)"),
}
_STORE_COUNTERS = {
    "store_evicted": ("evicted_total", "Blocks deleted from SSD to make room"),
    "store_expired": ("expired_total", "Blocks deleted from SSD because of their age"),
    "store_disk_errors": ("disk_errors_total", "Operations on SSD that failed"),
}
"""By name: the field of `StoreStats`, and the help. Engines of one KV store report the same."""


class LoopSeries:
    """The observations of one model in a `LoopHistogram`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class LoopHistogram(Collector):
    """A histogram by model for per-token events, observed only on the event loop.

    prometheus_client's histogram takes a lock and checks bucket after bucket: it takes ten times as
    long.
    """

    def __init__(self, name: str, help_: str, bounds: Sequence[float]) -> None:
        self._name, self._help = name, help_
        self._bounds = sorted(bounds)
        self._series: dict[str, LoopSeries] = {}

    def labels(self, model: str) -> LoopSeries:
        found = self._series.get(model)
        if found is None:
            found = self._series[model] = LoopSeries(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._help, labels=["model"])
        for model, series in self._series.items():
            buckets = list(zip(bounds, itertools.accumulate(series.counts), strict=True))
            family.add_metric([model], buckets, series.sum)
        yield family


class Metrics:
    """The router's counters. An `EngineCollector` in ``registry`` adds those of its engines."""

    def __init__(self, version: str) -> None:
        self.registry, self.recent = CollectorRegistry(auto_describe=False), Recent()

        def counter(name: str, help_: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(_PREFIX + name, help_, list(labels), registry=self.registry)

        def histogram(name: str, help_: str) -> Histogram:
            name = f"{_PREFIX}{name}_seconds"
            return Histogram(name, help_, ["model"], buckets=_SECONDS, registry=self.registry)

        self.requests = counter("requests", "Responses by path and status", ("path", "status"))
        self.first_token = histogram("time_to_first_token", "From admission to the first token")
        self.inter_token = LoopHistogram(
            f"{_PREFIX}inter_token_seconds", "Time between two deltas", _SHORT_SECONDS
        )
        self.registry.register(self.inter_token)
        self.end_to_end = histogram("end_to_end", "Time from admission to the end of the answer")
        self.queue_time = histogram("queue_time", "Time from admission to an engine")
        self.prefill_time = histogram("prefill", "Prefill time of one sequence")
        self.decode_time = histogram("decode", "Decode time of one sequence")
        self.encode_time = histogram("encode", "Time to compute vectors or scores of some texts")
        self.aborts = counter("aborts", "Sequences aborted: client disconnected, timeout, drain")
        self.resumed = counter("resumed_requests", "Sequences resubmitted after a failure")
        self.timeouts = counter("timeouts", "Sequences ended by a timeout")
        self.decisions = counter("decisions", "Typed questions that were answered", ("model",))
        self.adapter_requests = counter(
            "adapter_requests", "Requests that named an adapter", ("model", "adapter")
        )
        self.restarts = counter("engine_restarts", "Engines that were lost", ("engine",))
        self.engines_joined = counter("engines_joined", "Engines that joined", ("model",))
        self.engines_left = counter("engines_left", "Engines that left or were lost", ("reason",))
        self.engines_refused = counter(
            "engines_refused", "Refused connections and engines", ("reason",)
        )
        self.dropped_messages = counter("dropped_messages", "Invalid wire messages")
        self.loop_lag = Histogram(
            f"{_PREFIX}event_loop_lag_seconds",
            "Delay of the event loop",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self._add_counters_of_batches(counter)
        self.connections_refused = counter(
            "connections_refused",
            "HTTP connections closed because too many file descriptors were in use",
        )
        self.work_refused = counter(
            "work_refused", "Requests rejected because the preparation threads were busy"
        )
        self.images = ImageMetrics(self.registry)
        self._add_counters_of_keys(counter)
        self._add_build_info(version)

    def _add_build_info(self, version: str) -> None:
        build = Gauge(f"{_PREFIX}build_info", "Always 1", ["version"], registry=self.registry)
        build.labels(version).set(1)

    def _add_counters_of_keys(self, counter: Callable[..., Counter]) -> None:
        self.key_requests = counter(
            "key_requests", "Responses by API key and status", ("key", "status")
        )
        self.key_refusals = counter(
            "key_refusals", "Requests rejected with 429, by API key and code", ("key", "code")
        )
        self.key_prompt_tokens = counter("key_prompt_tokens", "Prompt tokens", ("key",))
        self.key_generated_tokens = counter("key_generated_tokens", "Generated tokens", ("key",))
        self.limits_store_errors = counter(
            "limits_store_errors", "Times that the --limits-url store did not respond"
        )
        self.limits_store_up = Gauge(
            f"{_PREFIX}limits_store_up",
            "0: the --limits-url store is unreachable, and this router counts alone",
            registry=self.registry,
        )

    def _add_counters_of_batches(self, counter: Callable[..., Counter]) -> None:
        self.batch_lines = counter(
            "batch_lines",
            "Finished lines of batches, by path and status",
            ("path", "status"),
        )
        self.batch_places_returned = counter(
            "batch_places_returned", "Lines of batches that were preempted for other requests"
        )
        self.batch_store_errors = counter("batch_store_errors", "Failed writes of batch state")

    def add_gauge(self, name: str, help_: str, value: Callable[[], float]) -> None:
        """Add a gauge that is evaluated only when Prometheus scrapes."""
        Gauge(_PREFIX + name, help_, registry=self.registry).set_function(value)

    def on_tokens(self, model: str, now: float, previous: float, arrived_at: float) -> None:
        """Observe new tokens of a sequence at ``now``. The ``previous`` ones came at that time; 0:
        there were none. Times are from ``time.monotonic``."""
        if previous:
            self.inter_token.labels(model).observe(now - previous)
        else:
            first_token_s = now - arrived_at
            self.first_token.labels(model).observe(first_token_s)
            self.recent.on_first_token(model, now, first_token_s)

    def exposition(self, *, with_keys: bool) -> bytes:
        """Return all metrics, or without those that name API keys."""
        if with_keys:
            return generate_latest(self.registry)
        return generate_latest(_WithoutKeys(self.registry))


class _WithoutKeys(Collector):
    """The metrics of a registry, except for those that name API keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        own = _PREFIX + "key_"
        return (each for each in self._registry.collect() if not each.name.startswith(own))


@dataclass(eq=False)
class EngineCollector(Collector):
    """Metrics that are evaluated only when Prometheus scrapes."""

    models: Mapping[str, ModelReplicas]
    versions: Callable[[], Iterable[ModelReplicas]]
    """The current models, and their earlier and upcoming versions."""
    num_waiting: Callable[[str], int]
    shutdown_clean: Callable[[], bool]

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        engines = [(model.id, engine) for model in self.versions() for engine in model.engines]
        for name, (field, help_) in _ENGINE_GAUGES.items():
            yield _family(GaugeMetricFamily(name, help_, labels=_LABELS), engines, field)
        for name, (field, help_) in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, help_, labels=_LABELS)
            yield _family(counter, engines, field)
        yield from _store_metrics(engines)
        yield from _draft_metrics(engines)
        hits = GaugeMetricFamily(
            "cache_hit_rate", "Fraction of prompt tokens found in a cache", labels=_LABELS
        )
        ready = GaugeMetricFamily(f"{_PREFIX}engine_ready", "Accepts requests", labels=_LABELS)
        used = GaugeMetricFamily(
            f"{_PREFIX}kv_utilization",
            "Fraction of the KV memory held by running sequences",
            labels=_LABELS,
        )
        for model, engine in engines:
            hits.add_metric([model, engine.name], _hit_rate(engine))
            ready.add_metric([model, engine.name], float(engine.trouble is None))
            used.add_metric([model, engine.name], engine.memory_pressure)
        yield from (hits, ready, used)
        queued = GaugeMetricFamily(
            "queued_requests", "Sequences queued for an engine", labels=["model"]
        )
        for model in self.models:
            queued.add_metric([model], self.num_waiting(model))
        yield queued
        yield GaugeMetricFamily(
            "dist_fatal",
            "1: a tensor parallel group has failed and not recovered",
            value=float(any(_is_failed_group(engine) for _, engine in engines)),
        )
        yield GaugeMetricFamily(
            "shutdown_clean",
            "0: the current shutdown had to cancel requests",
            value=float(self.shutdown_clean()),
        )


_LABELS = ("model", "engine")


def _is_failed_group(engine: Engine) -> bool:
    is_lost = engine.lost_reason is not None and not engine.left
    return is_lost and TENSOR_PARALLEL in engine.hello.capabilities


def _family(
    family: GaugeMetricFamily | CounterMetricFamily,
    engines: Iterable[tuple[str, Engine]],
    field: str,
) -> Metric:
    for model, engine in engines:
        family.add_metric([model, engine.name], getattr(engine.stats, field))
    return family


def _store_metrics(engines: Iterable[tuple[str, Engine]]) -> Iterator[Metric]:
    """Yield the figures of the KV store, by engine that reports them."""
    stores = [(model, engine.name, engine.store) for model, engine in engines if engine.store]
    state = GaugeMetricFamily(
        f"{_PREFIX}store_state",
        "1 for the current state of the SSD's disk",
        labels=(*_LABELS, "state"),
    )
    for model, name, store in stores:
        for value in get_args(StoreState):
            state.add_metric([model, name, value], float(store.state == value))
    yield state
    tables = ((_STORE_GAUGES, GaugeMetricFamily), (_STORE_COUNTERS, CounterMetricFamily))
    for table, make in tables:
        for name, (field, help_) in table.items():
            family = make(_PREFIX + name, help_, labels=_LABELS)
            for model, engine_name, store in stores:
                family.add_metric([model, engine_name], getattr(store, field))
            yield family


def _draft_metrics(engines: Iterable[tuple[str, Engine]]) -> Iterator[Metric]:
    """Yield the figures of speculation, by source of drafts."""
    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    for kind, name, field, help_ in (
        (counter, "draft_proposals", "proposals", "Runs of draft tokens that were verified"),
        (counter, "draft_tokens", "drafted", "Draft tokens"),
        (counter, "accepted_draft_tokens", "accepted", "Draft tokens that were accepted"),
        (counter, "draft_seconds", "spent_s", "Seconds spent on drafting"),
        (gauge, "draft_saved_seconds", "saved_s", "Seconds saved by drafts since the start"),
    ):
        family = kind(_PREFIX + name, help_, labels=(*_LABELS, "source"))
        for model, engine in engines:
            for source, counts in (engine.stats.drafts or DraftStats()).sources.items():
                family.add_metric([model, engine.name, source], getattr(counts, field))
        yield family


def _hit_rate(engine: Engine) -> float:
    stats = engine.stats
    cached = stats.cached_ram_tokens_total + stats.cached_ssd_tokens_total
    return cached / stats.prompt_tokens_total if stats.prompt_tokens_total else 0.0
