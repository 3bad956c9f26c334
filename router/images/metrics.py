"""What is counted of images before an engine gets them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "mlx_lm_server_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ImageMetrics:
    """Counters in ``registry``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._received = Counter(
            f"{_PREFIX}received_images", "Images of requests, once prepared", registry=registry
        )
        self._cached = Counter(
            f"{_PREFIX}prepared_image_hits", "Of these, prepared before", registry=registry
        )
        self._rejected = Counter(
            f"{_PREFIX}rejected_images", "Images refused, by reason", ["reason"], registry=registry
        )
        self._lost = Counter(
            f"{_PREFIX}image_decoders_lost",
            "Processes that decode images and ended, or had to be ended",
            registry=registry,
        )
        self._memory = Gauge(
            f"{_PREFIX}image_memory_bytes",
            "Memory of the router for images in use, and kept",
            registry=registry,
        )
        self._seconds = Histogram(
            f"{_PREFIX}image_decode_seconds",
            "Decoding and preparing one image",
            buckets=_SECONDS,
            registry=registry,
        )

    def watch_memory(self, used_bytes: Callable[[], float]) -> None:
        """Report what ``used_bytes`` returns when Prometheus asks."""
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
