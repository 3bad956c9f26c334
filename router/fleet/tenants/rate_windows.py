"""Usage within the last minute: in memory, or in a Redis shared by several routers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from limits.aio.storage import MovingWindowSupport, RedisStorage

from router.fleet.metrics.prometheus import Metrics

logger = logging.getLogger(__name__)

WINDOW_S = 60
TIMEOUT_S = 1.0
"""How long a request waits for a response from Redis."""
_READ_ATTEMPTS = 2
"""An amount is sent once: one whose reply was late or lost may have been added."""
_MAX_CONNECTIONS = 16
_MAX_ENTRIES = 4096
"""Max entries of a window in Redis, which has one entry per unit."""
_UNLIMITED = 2**31
_PRUNE_AT = 1024
_PROBE = "probe"
"""A window that only shows whether Redis takes amounts."""

_Result = TypeVar("_Result")


class LimitsStoreError(Exception):
    """The rate limit store is not usable; the message is one line for the user."""


class MemoryWindows(MovingWindowSupport):
    """Moving windows in this process.

    The memory storage of `limits` visits every key at each hit, starts a thread for each, and uses
    a clock that may be adjusted. This one costs a few operations, whatever is counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)
        self._totals: Counter[str] = Counter()
        self._prune_at = _PRUNE_AT

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        now = self._clock()
        if len(self._entries) > self._prune_at:
            self._prune(now - expiry)
        entries = self._entries[key]
        while entries and entries[0][0] <= now - expiry:
            self._totals[key] -= entries.popleft()[1]
        if self._totals[key] + amount > limit:
            return False
        grain_s = expiry / 1000
        at = (now // grain_s + 1) * grain_s  # so that there are at most 1,000 entries
        before = entries.pop()[1] if entries and entries[-1][0] == at else 0
        entries.append((at, before + amount))
        self._totals[key] += amount
        return True

    def _prune(self, since: float) -> None:
        """Drop what has no recent entries: without API keys, there is one for each address."""
        old = [key for key, found in self._entries.items() if not found or found[-1][0] < since]
        for key in old:
            del self._entries[key]
            self._totals.pop(key, None)
        self._prune_at = _PRUNE_AT + 2 * len(self._entries)

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        since = self._clock() - expiry
        recent = [entry for entry in self._entries[key] if entry[0] > since]
        return (recent[0][0], sum(amount for _, amount in recent)) if recent else (since, 0)


class RateWindows:
    """Amounts of the last minute, by name. A name may be any string.

    While Redis does not respond, this router counts on its own: limits then apply per router, and
    no request waits. (The alternatives were to refuse or to allow everything.)
    """

    def __init__(self, url: str | None, metrics: Metrics) -> None:
        """Raises `LimitsStoreError`."""
        self._own = MemoryWindows()
        self._shared: RedisStorage | None = None
        self._errors: tuple[type[Exception], ...] = (OSError, TimeoutError)
        if url is not None:
            self._shared, self._disconnect, redis_error = _connect(url)
            self._errors += (redis_error,)
        self._metrics = metrics
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._lost = False
        metrics.limits_store_up.set(1)

    @property
    def is_shared(self) -> bool:
        """Whether they are in a Redis, which may be lost and must then be polled."""
        return self._shared is not None

    def unit(self, limit: int) -> int:
        """Return the amount counted as one unit, so that a window has a bounded size."""
        return 1 if self._shared is None else -(-limit // _MAX_ENTRIES)

    async def acquire(self, name: str, limit: int, amount: int) -> bool:
        """Add ``amount`` if the total does not exceed ``limit``; return whether it was added."""
        return await self._ask(lambda store: store.acquire_entry(name, limit, WINDOW_S, amount))

    async def charge(self, name: str, amount: int) -> None:
        """Add ``amount`` regardless of the limit: it has been used."""
        limit = _UNLIMITED + amount
        await self._ask(lambda store: store.acquire_entry(name, limit, WINDOW_S, amount))

    async def used(self, name: str, within_s: int = WINDOW_S) -> int:
        """Return the usage of the last ``within_s`` seconds."""
        found = await self._ask(
            lambda store: store.get_moving_window(name, _UNLIMITED, within_s), _READ_ATTEMPTS
        )
        return found[1]

    async def wait_s(self, name: str, limit: int, amount: int) -> int:
        """Return the whole seconds until ``amount`` can be added, if nothing else is."""
        too_early, enough = -1, WINDOW_S + 1  # one more, because windows in memory are rounded up
        while enough - too_early > 1:
            middle = (too_early + enough) // 2
            if await self.used(name, WINDOW_S - middle) + amount <= limit:
                enough = middle
            else:
                too_early = middle
        return enough

    async def close(self) -> None:
        if self._shared is not None:
            await self._disconnect()

    async def recover(self) -> bool:
        """Check a Redis that failed; return whether it takes amounts again. It may answer and take
        none: one that is full, or a replica."""
        if self._shared is None or not self._lost:
            return False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._shared.acquire_entry(_PROBE, 1, 1)
        except self._errors:
            return False
        self._lost = False
        self._metrics.limits_store_up.set(1)
        logger.info("--limits-url: connected again")
        return True

    async def _ask(
        self, operation: Callable[[MovingWindowSupport], Awaitable[_Result]], attempts: int = 1
    ) -> _Result:
        # The timeout for a response starts when there is a connection: many simultaneous requests
        # do not mean that Redis is down.
        async with self._connections:
            for attempt in range(attempts):
                if self._shared is None or self._lost:
                    break
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        return await operation(self._shared)
                except self._errors as error:
                    if attempt == attempts - 1:
                        self._on_failure(error)
        return await operation(self._own)

    def _on_failure(self, error: Exception) -> None:
        self._metrics.limits_store_errors.inc()
        if not self._lost:
            self._lost = True
            self._metrics.limits_store_up.set(0)
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.error(
                "--limits-url: %s; this router counts alone until it responds again", reason
            )


def _connect(
    url: str,
) -> tuple[RedisStorage, Callable[[], Awaitable[None]], type[Exception]]:
    """Return the storage at ``url``, its close function, and its error type.

    It connects on demand.

    Valkey speaks Redis' protocol, so one client library is enough. Raises `LimitsStoreError`.
    """
    try:
        from redis.asyncio import ConnectionPool
        from redis.exceptions import RedisError
    except ImportError:
        raise LimitsStoreError("requires the extra 'redis'") from None

    address = url.replace("valkey", "redis", 1).replace("redis+unix://", "unix://", 1)
    pool = ConnectionPool.from_url(
        address,
        max_connections=_MAX_CONNECTIONS,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
    )
    options: dict[str, Any] = {"connection_pool": pool}
    storage = RedisStorage(
        f"async+{url.replace('valkey', 'redis', 1)}",
        implementation="redispy",
        key_prefix="mlx-lm-server",
        **options,
    )
    return storage, pool.aclose, RedisError
