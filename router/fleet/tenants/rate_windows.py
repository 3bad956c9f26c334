"""What was used within the last minute: in memory, or in a Redis that several routers share."""

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
"""How long a request waits for an answer of Redis."""
_ATTEMPTS = 2
_MAX_CONNECTIONS = 16
_MAX_ENTRIES = 4096
"""The most entries of one window in Redis, which has one for each unit."""
_UNLIMITED = 2**31

_Result = TypeVar("_Result")


class LimitsStoreError(Exception):
    """The store of the limits cannot be used; the message is one line for the user."""


class MemoryWindows(MovingWindowSupport):
    """Moving windows in this process.

    That of `limits` visits every key at each hit, with a thread for each, and counts by a clock
    that may be set. This one costs a few operations, whatever is counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)
        self._totals: Counter[str] = Counter()

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        entries, now = self._entries[key], self._clock()
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

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        since = self._clock() - expiry
        recent = [entry for entry in self._entries[key] if entry[0] > since]
        return (recent[0][0], sum(amount for _, amount in recent)) if recent else (since, 0)


class RateWindows:
    """Amounts by name, of the last minute. A name may have any string in it.

    While Redis does not answer, this router counts by itself: limits hold for each router then,
    and no request waits. (To refuse everything, or to allow everything, were the alternatives.)
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
        """Whether they are in a Redis, which may be lost, and has to be asked whether it is."""
        return self._shared is not None

    def unit(self, limit: int) -> int:
        """Return the amount that is counted as one, so that a window has a bounded size."""
        return 1 if self._shared is None else -(-limit // _MAX_ENTRIES)

    async def acquire(self, name: str, limit: int, amount: int) -> bool:
        """Add ``amount`` if no more than ``limit`` is used then; return whether it was added."""
        return await self._ask(lambda store: store.acquire_entry(name, limit, WINDOW_S, amount))

    async def charge(self, name: str, amount: int) -> None:
        """Add ``amount``, whatever the limit is: it has been used."""
        limit = _UNLIMITED + amount
        await self._ask(lambda store: store.acquire_entry(name, limit, WINDOW_S, amount))

    async def used(self, name: str, within_s: int = WINDOW_S) -> int:
        """Return what was used within the last ``within_s`` seconds."""
        found = await self._ask(lambda store: store.get_moving_window(name, _UNLIMITED, within_s))
        return found[1]

    async def wait_s(self, name: str, limit: int, amount: int) -> int:
        """Return the whole seconds after which ``amount`` can be added, if nothing else is."""
        too_early, enough = -1, WINDOW_S + 1  # one more, as windows in memory are rounded up
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
        """Ask a Redis that did not answer whether it does now; return whether it does again."""
        if self._shared is None or not self._lost:
            return False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answers = await self._shared.check()
        except self._errors:
            return False
        if answers:
            self._lost = False
            self._metrics.limits_store_up.set(1)
            logger.info("--limits-url: it answers again")
        return answers

    async def _ask(self, operation: Callable[[MovingWindowSupport], Awaitable[_Result]]) -> _Result:
        # The time for an answer begins when there is a connection: many requests at once are no
        # sign that Redis is gone.
        async with self._connections:
            for attempt in range(_ATTEMPTS):
                if self._shared is None or self._lost:
                    break
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        return await operation(self._shared)
                except self._errors as error:
                    if attempt == _ATTEMPTS - 1:
                        self._on_failure(error)
        return await operation(self._own)

    def _on_failure(self, error: Exception) -> None:
        self._metrics.limits_store_errors.inc()
        if not self._lost:
            self._lost = True
            self._metrics.limits_store_up.set(0)
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.error("--limits-url: %s; until it answers, this router counts alone", reason)


def _connect(
    url: str,
) -> tuple[RedisStorage, Callable[[], Awaitable[None]], type[Exception]]:
    """Return the storage at ``url``, what closes its connections, and its error.

    It is connected to when it is needed.

    Valkey speaks Redis' protocol, so one client library is enough. Raises `LimitsStoreError`.
    """
    try:
        from redis.asyncio import ConnectionPool
        from redis.exceptions import RedisError
    except ImportError:
        raise LimitsStoreError("it needs the extra 'redis'") from None

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
