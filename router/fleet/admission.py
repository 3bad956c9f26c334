"""Limits on new requests: concurrent requests, the length of the queue, memory pressure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.errors import TooManyRequests, Unavailable
from router.fleet.engines import ModelReplicas
from shared.settings import Settings

_RETRY_AFTER_S = 2.0
_LONGEST_RETRY_AFTER_S = 120.0
_MEMORY_RETRY_AFTER_S = 5.0


class DepartureRate:
    """The rate at which sequences leave engines, estimated from the last departures."""

    def __init__(self, window: int = 32, clock: Callable[[], float] = time.monotonic) -> None:
        self._departures: deque[float] = deque(maxlen=window)
        self._clock = clock

    def record(self) -> None:
        self._departures.append(self._clock())

    def wait_s(self, ahead: int) -> float:
        """Estimate the time until ``ahead`` sequences have left and one more has a place."""
        if len(self._departures) < 2:
            return _RETRY_AFTER_S
        # Counted up to now, or a queue that stands still would look fast.
        elapsed_s = self._clock() - self._departures[0]
        estimate_s = (ahead + 1) * elapsed_s / (len(self._departures) - 1)
        return min(max(estimate_s, 1.0), _LONGEST_RETRY_AFTER_S)


class Admission:
    def __init__(self, settings: Settings, departure_rate: DepartureRate) -> None:
        self._settings = settings
        self._departure_rate = departure_rate
        self.num_requests = 0
        """Running and queued ones."""

    @contextmanager
    def limit_concurrency(self) -> Iterator[None]:
        """Count one request while it is served. Raises `TooManyRequests`."""
        limit = self._settings.max_concurrent_requests
        if limit and self.num_requests >= limit:
            raise TooManyRequests(
                f"The server has {self.num_requests} requests, which is its limit.",
                code="too_many_concurrent_requests",
                retry_after_s=self._departure_rate.wait_s(0),
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def check_queue(self, model: ModelReplicas, waiting: int, new: int) -> None:
        """Check that ``new`` sequences may join ``waiting`` ones. Raises `TooManyRequests`.

        While no sequence waits, a request may have more sequences than the queue holds. It would
        never be admitted otherwise.
        """
        capacity = sum(engine.free_capacity for engine in model.ready_engines)
        limit = self._settings.max_queue_size
        if waiting and waiting + new > limit + capacity:
            raise TooManyRequests(
                f"The queue is full ({waiting} waiting).",
                code="queue_full",
                retry_after_s=self._departure_rate.wait_s(waiting),
            )

    def check_memory(self, model: ModelReplicas) -> None:
        """Raise `Unavailable` if every ready engine is under memory pressure."""
        ready = model.ready_engines
        threshold = self._settings.memory_pressure_threshold
        if ready and min(engine.memory_pressure for engine in ready) >= threshold:
            raise Unavailable(
                "The server is short of KV cache memory.",
                code="memory_pressure",
                retry_after_s=max(_MEMORY_RETRY_AFTER_S, self._departure_rate.wait_s(0)),
            )
