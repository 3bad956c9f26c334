"""The shared context of the endpoints and jobs of batches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from router.batches.directory import BatchDirectory
from router.batches.store import StorageFailed
from router.fleet.metrics.batch_figures import BatchFigures
from router.fleet.metrics.prometheus import Metrics
from router.fleet.router import MOST_REQUEST_BYTES
from router.fleet.tenants.tenant import Tenant
from router.places import Places
from shared.settings import Settings

_DAY_S = 86400
_MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class BatchContext:
    """What batches and their files share."""

    directory: BatchDirectory
    endpoints: Mapping[str, ASGIApp]
    """The handlers of requests, by path."""
    tenant_named: Callable[[str], Tenant | None]
    settings: Settings
    metrics: Metrics
    figures: BatchFigures
    places: Places
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the router ends."""
    checking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Threads that read or write whole files."""
    began: float = field(default_factory=time.monotonic)

    @property
    def keep_s(self) -> int:
        return self.settings.batch_keep_days * _DAY_S

    @property
    def max_bytes(self) -> int:
        """Max total size of a key's files and results."""
        return self.settings.batch_max_mb * _MB

    @property
    def max_body_bytes(self) -> int:
        """Max size of a line's body, whichever model it is for."""
        return self.settings.max_request_bytes or MOST_REQUEST_BYTES

    @property
    def is_young(self) -> bool:
        """Whether engines may still be joining, so that a missing model may still come."""
        return time.monotonic() - self.began < self.settings.restart_wait_s

    async def refresh(self) -> None:
        """Update the figures, if the disk allows it."""
        with contextlib.suppress(StorageFailed):
            found = await self.directory.run(lambda store: store.totals())
            self.figures.unfinished, self.figures.lines, self.figures.lines_done = found
