"""Limits on new requests: concurrent requests, the length of the queue, memory pressure.

With several tenants, none can take all of the shared capacity (`router.fair_shares`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import TooManyRequests, Unavailable
from router.fair_shares import FairShares
from router.fleet.engines.engine import ModelReplicas
from router.fleet.queue.model_queue import DepartureRate, ModelQueue
from router.fleet.tenants.tenant import Tenant
from shared.settings import Settings

_MEMORY_RETRY_AFTER_S = 5.0


class Admission:
    def __init__(self, settings: Settings, departure_rate: DepartureRate) -> None:
        self._settings = settings
        self._departure_rate = departure_rate
        self._requests = FairShares()
        """The running and queued requests."""
        self._num_requests_to: Counter[str] = Counter()
        """The same by model."""

    @property
    def num_requests(self) -> int:
        """Number of running and queued requests."""
        return self._requests.total

    @contextmanager
    def limit_concurrency(self, tenant: Tenant, model_id: str, limit: int) -> Iterator[None]:
        """Count a request of ``tenant`` to a model, which has its own ``limit`` (0: none), while it
        is served. Raises `TooManyRequests`. Requests of batches are not counted, because they use
        only idle capacity."""
        if tenant.background:
            yield
            return
        reason = self._too_many(tenant)
        if limit and self._num_requests_to[model_id] >= limit:
            reason = reason or (
                f"The model {model_id} has reached its limit of {limit} concurrent requests."
            )
        if reason is not None:
            raise TooManyRequests(
                reason,
                code="too_many_concurrent_requests",
                retry_after_s=self._departure_rate.wait_s(0),
            )
        self._requests.take(tenant.share)
        self._num_requests_to[model_id] += 1
        try:
            yield
        finally:
            self._requests.give_back(tenant.share)
            self._num_requests_to[model_id] -= 1

    def _too_many(self, tenant: Tenant) -> str | None:
        """Return the reason why no further request of ``tenant`` can be accepted, if any."""
        own, limit = self._requests.of(tenant.share), self._settings.max_concurrent_requests
        if tenant.concurrency and own >= tenant.concurrency:
            return f"This {tenant.noun} has reached its limit of {own} concurrent requests."
        if not limit or self._requests.has_room(tenant.share, limit, alone=tenant.alone):
            return None
        if (free := limit - self.num_requests) > 0:
            return (
                f"This {tenant.noun} has {own} requests. The remaining {free} slots are reserved "
                "for others."
            )
        return f"The server has reached its limit of {self.num_requests} concurrent requests."

    def check_queue(
        self, model: ModelReplicas, queue: ModelQueue, tenant: Tenant, *, priority: int, new: int
    ) -> None:
        """Check that ``new`` sequences of ``tenant`` may join ``queue``. Raises `TooManyRequests`.

        If it has no queued sequences, a request may have more sequences than the queue holds,
        because otherwise it would never be admitted.
        """
        if tenant.background:
            return
        capacity = sum(engine.free_capacity for engine in model.ready_engines)
        waiting, own = queue.num_waiting, queue.num_waiting_of(tenant)
        places = model.settings.max_queue_size + capacity - waiting
        if own and new + (0 if tenant.alone else own) > places:
            raise TooManyRequests(
                f"The queue is full ({waiting} requests queued, {own} of them for this "
                f"{tenant.noun}).",
                code="queue_full",
                retry_after_s=self._departure_rate.wait_s(waiting),
            )
        limit_s = model.settings.first_token_timeout_s
        wait_s = queue.predicted_wait_s(tenant, priority)
        if wait_s > limit_s:
            raise TooManyRequests(
                f"The queue is too long: the first token is expected after {wait_s:.0f} s, but "
                f"the timeout for it is {limit_s:g} s.",
                code="queue_too_long",
                retry_after_s=max(1.0, wait_s - limit_s),
            )

    def check_memory(self, model: ModelReplicas) -> None:
        """Raise `Unavailable` if every ready engine is under memory pressure."""
        ready = model.ready_engines
        threshold = model.settings.memory_pressure_threshold
        if ready and min(engine.memory_pressure for engine in ready) >= threshold:
            raise Unavailable(
                "The server is out of KV cache memory.",
                code="memory_pressure",
                retry_after_s=max(_MEMORY_RETRY_AFTER_S, self._departure_rate.wait_s(0)),
            )
