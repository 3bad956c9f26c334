"""Metrics of images before they reach an engine."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "mlx_lm_server_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ImageMetrics:
    """Creates its counters in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._received = Counter(
            f"{_PREFIX}received_images", "Images prepared for requests", registry=registry
        )
        self._cached = Counter(
            f"{_PREFIX}prepared_image_hits", "Of these, found in the cache", registry=registry
        )
        self._rejected = Counter(
            f"{_PREFIX}rejected_images", "Images rejected, by reason", ["reason"], registry=registry
        )
        self._lost = Counter(
            f"{_PREFIX}image_decoders_lost",
            "Image decoder processes that crashed or were killed",
            registry=registry,
        )
        self._memory = Gauge(
            f"{_PREFIX}image_memory_bytes",
            "Router memory for images in use and cached",
            registry=registry,
        )
        self._seconds = Histogram(
            f"{_PREFIX}image_decode_seconds",
            "Time to decode and prepare one image",
            buckets=_SECONDS,
            registry=registry,
        )

    def watch_memory(self, used_bytes: Callable[[], float]) -> None:
        """Report the result of ``used_bytes`` when Prometheus scrapes."""
        self._memory.set_function(used_bytes)

    def prepared(self, seconds: float) -> None:
        self._received.inc()
        self._seconds.observe(seconds)

    def cached(self) -> None:
        self._received.inc()
        self._cached.inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def lost(self) -> None:
        self._lost.inc()
