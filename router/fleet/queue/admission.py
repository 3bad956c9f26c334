"""Limits on new requests: concurrent requests, the length of the queue, memory pressure.

Where there are several tenants, none can fill what they share. One may take another place only
while it has fewer places than are free: alone it gets half of them, beside k others that want as
many a (k + 2)th, and some are always free for one that comes anew. (Dynamic thresholds: Choudhury
and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998. Fixed shares
were the alternative: two of a half leave nothing to a third.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from router.errors import TooManyRequests, Unavailable
from router.fleet.engines.engine import ModelReplicas
from router.fleet.queue.model_queue import DepartureRate, ModelQueue
from router.fleet.tenants.tenant import Tenant
from shared.settings import Settings

_MEMORY_RETRY_AFTER_S = 5.0


class Admission:
    def __init__(self, settings: Settings, departure_rate: DepartureRate) -> None:
        self._settings = settings
        self._departure_rate = departure_rate
        self.num_requests = 0
        """Running and queued ones."""
        self.num_requests_of: Counter[str] = Counter()
        """The same by tenant; only those that have any."""
        self._num_requests_to: Counter[str] = Counter()
        """The same by model."""

    @contextmanager
    def limit_concurrency(self, tenant: Tenant, model_id: str, limit: int) -> Iterator[None]:
        """Count one request of ``tenant`` to a model, which has a ``limit`` of its own (0: none),
        while it is served. Raises `TooManyRequests`. Lines of batches are not counted: they take
        no place that anybody else wants."""
        if tenant.background:
            yield
            return
        reason = self._too_many(tenant)
        if limit and self._num_requests_to[model_id] >= limit:
            reason = reason or f"The model {model_id} has {limit} requests, which is its limit."
        if reason is not None:
            raise TooManyRequests(
                reason,
                code="too_many_concurrent_requests",
                retry_after_s=self._departure_rate.wait_s(0),
            )
        self.num_requests += 1
        self.num_requests_of[tenant.name] += 1
        self._num_requests_to[model_id] += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._num_requests_to[model_id] -= 1
            self.num_requests_of[tenant.name] -= 1
            if not self.num_requests_of[tenant.name]:
                del self.num_requests_of[tenant.name]

    def _too_many(self, tenant: Tenant) -> str | None:
        """Return why no further request of ``tenant`` can be taken, if so."""
        own, limit = self.num_requests_of[tenant.name], self._settings.max_concurrent_requests
        if tenant.concurrency and own >= tenant.concurrency:
            return f"This API key has {own} requests, which is its limit."
        free = limit - self.num_requests
        if not limit or own < free or (tenant.alone and free > 0):
            return None
        if free > 0:
            return f"This API key has {own} requests. The other {free} places are for other keys."
        return f"The server has {self.num_requests} requests, which is its limit."

    def check_queue(
        self, model: ModelReplicas, queue: ModelQueue, tenant: Tenant, *, priority: int, new: int
    ) -> None:
        """Check that ``new`` sequences of ``tenant`` may join ``queue``. Raises `TooManyRequests`.

        While none of its sequences waits, a request may have more sequences than the queue holds.
        It would never be admitted otherwise.
        """
        if tenant.background:
            return
        capacity = sum(engine.free_capacity for engine in model.ready_engines)
        waiting, own = queue.num_waiting, queue.num_waiting_of(tenant)
        places = model.settings.max_queue_size + capacity - waiting
        if own and new + (0 if tenant.alone else own) > places:
            raise TooManyRequests(
                f"The queue is full ({waiting} waiting, {own} of them with this API key).",
                code="queue_full",
                retry_after_s=self._departure_rate.wait_s(waiting),
            )
        limit_s = model.settings.first_token_timeout_s
        wait_s = queue.predicted_wait_s(tenant, priority)
        if wait_s > limit_s:
            raise TooManyRequests(
                f"The queue is too long: the first token would come after {wait_s:.0f} s, and the"
                f" server ends what has none after {limit_s:g} s.",
                code="queue_too_long",
                retry_after_s=max(1.0, wait_s - limit_s),
            )

    def check_memory(self, model: ModelReplicas) -> None:
        """Raise `Unavailable` if every ready engine is under memory pressure."""
        ready = model.ready_engines
        threshold = model.settings.memory_pressure_threshold
        if ready and min(engine.memory_pressure for engine in ready) >= threshold:
            raise Unavailable(
                "The server is short of KV cache memory.",
                code="memory_pressure",
                retry_after_s=max(_MEMORY_RETRY_AFTER_S, self._departure_rate.wait_s(0)),
            )
