"""Requests and tokens per minute for each tenant."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from typing import NamedTuple, NoReturn

from router.errors import InvalidRequest, TooManyRequests
from router.fleet.metrics.prometheus import Metrics
from router.fleet.tenants.rate_windows import WINDOW_S, RateWindows
from router.fleet.tenants.tenant import Tenant

logger = logging.getLogger(__name__)

_FLUSH_S = 0.25


class _Refusal(NamedTuple):
    """An amount that did not fit into a window. Times are from ``time.monotonic``."""

    limit: int
    amount: int
    until: float
    """When it will fit, if nothing else is added."""
    reset_at: float
    """When the window will be empty, if nothing else is added."""

    def holds_for(self, limit: int, amount: int) -> bool:
        same = limit <= self.limit and amount >= self.amount
        return same and time.monotonic() < self.until


class RateLimits:
    """The limits of all tenants.

    A request counts on arrival, its prompt once tokenized, its answer as it is generated. Tokens
    that an aborted request did not generate are not counted.
    """

    def __init__(self, url: str | None, metrics: Metrics) -> None:
        self._windows = RateWindows(url, metrics)
        self._metrics = metrics
        self._uncharged: Counter[Tenant] = Counter()
        """Tokens not yet in the windows; negative if the windows have too many."""
        self._used = asyncio.Event()
        """Set when `_uncharged` may have entries."""
        self._refusals: dict[str, _Refusal] = {}
        """The last refusal of each window."""

    async def admit_request(self, tenant: Tenant, headers: dict[str, str]) -> None:
        """Count a request. Put the remaining limits into ``headers``. Raises `TooManyRequests`."""
        limit = tenant.requests_per_minute
        if not limit:
            return
        name = f"requests/{tenant.share}"
        refusal = await self._acquire(name, limit, 1)
        left = 0 if refusal else limit - await self._windows.used(name)
        headers.update(_headers("requests", limit, left, refusal))
        if refusal:
            raise TooManyRequests(
                f"This API key has reached its limit of {limit} requests per minute.",
                retry_after_s=refusal.until - time.monotonic(),
            )

    async def admit_prompt(self, tenant: Tenant, tokens: int, headers: dict[str, str]) -> None:
        """Count the tokens of a prompt. Put the remaining limits into ``headers``.

        Raises `TooManyRequests`, and `InvalidRequest` if waiting would not help.
        """
        limit = tenant.tokens_per_minute
        if limit:
            await self._admit_tokens(tenant, tokens, limit, headers)
        self._metrics.key_prompt_tokens.labels(tenant.name).inc(tokens)

    async def _admit_tokens(
        self, tenant: Tenant, tokens: int, limit: int, headers: dict[str, str]
    ) -> None:
        if tokens > limit:
            raise InvalidRequest(
                f"The prompt has {tokens} tokens, but this API key is limited to {limit} tokens "
                "per minute.",
                code="prompt_over_rate_limit",
            )
        await self._flush(tenant)
        name, windows, unit = f"tokens/{tenant.share}", self._windows, self._windows.unit(limit)
        units = -(-tokens // unit)
        refusal = await self._acquire(name, max(units, limit // unit), units)
        left = max(0, limit - unit * await windows.used(name))
        headers.update(_headers("tokens", limit, left, refusal))
        if refusal:
            raise TooManyRequests(
                f"This API key has {left} of {limit} tokens left in this minute, but the prompt "
                f"has {tokens}.",
                retry_after_s=refusal.until - time.monotonic(),
            )
        self._uncharged[tenant] += tokens - units * unit
        self._used.set()

    async def _acquire(self, name: str, limit: int, amount: int) -> _Refusal | None:
        """Add ``amount`` to the window, or return the refusal.

        A refusal is remembered: until its time no other request can succeed, so that a client that
        keeps retrying causes no queries to Redis.
        """
        known = self._refusals.get(name)
        if known is not None and known.holds_for(limit, amount):
            return known
        self._refusals.pop(name, None)
        if await self._windows.acquire(name, limit, amount):
            return None
        wait_s = await self._windows.wait_s(name, limit, amount)
        reset_s = await self._windows.wait_s(name, 0, 0)
        now = time.monotonic()
        refusal = self._refusals[name] = _Refusal(limit, amount, now + wait_s, now + reset_s)
        return refusal

    def on_generated(self, tenant: Tenant, tokens: int) -> None:
        """Count tokens of an answer. They are added to the windows soon (`run`)."""
        self._metrics.key_generated_tokens.labels(tenant.name).inc(tokens)
        if tenant.tokens_per_minute:
            self._uncharged[tenant] += tokens
            self._used.set()

    async def run(self) -> NoReturn:
        """Add generated tokens to the windows, a few times per second while there are any."""
        while True:
            if not self._uncharged and not self._windows.is_shared:
                self._used.clear()
                await self._used.wait()
            await asyncio.sleep(_FLUSH_S)
            try:
                if await self._windows.recover():
                    self._refusals.clear()  # these are already in this router's own windows
                for tenant in list(self._uncharged):
                    await self._flush(tenant)
            except Exception:
                logger.exception("failed to count tokens")

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # the connection may be broken already
            await self._windows.close()

    async def _flush(self, tenant: Tenant) -> None:
        unit = self._windows.unit(tenant.tokens_per_minute)
        units = self._uncharged[tenant] // unit
        if units > 0:
            self._uncharged[tenant] -= units * unit
            await self._windows.charge(f"tokens/{tenant.share}", units)
        if not self._uncharged[tenant]:
            del self._uncharged[tenant]


def _headers(what: str, limit: int, remaining: int, refusal: _Refusal | None) -> dict[str, str]:
    """Return the rate limit headers in OpenAI's format.

    The reset is the time until the whole limit is available again: a full window after what was
    just admitted.
    """
    reset_s = math.ceil(refusal.reset_at - time.monotonic()) if refusal else WINDOW_S
    reset = f"{reset_s // 60}m{reset_s % 60}s" if reset_s >= 60 else f"{reset_s}s"
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, remaining)),
        f"x-ratelimit-reset-{what}": reset,
    }
