"""The shared context of the jobs of all batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from router.batches.storage.directory import BatchDirectory
from router.batches.storage.expiry import ExpiryClock
from router.batches.storage.writer import ResultWriter
from router.fleet.metrics.batch_figures import BatchFigures
from router.fleet.metrics.prometheus import Metrics
from router.fleet.router import MOST_REQUEST_BYTES
from router.fleet.tenants.tenant import Tenant
from router.places import Places
from shared.settings import Settings

logger = logging.getLogger(__name__)
_DAY_S = 86400
_MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class BatchContext:
    directory: BatchDirectory
    endpoints: Mapping[str, ASGIApp]
    """The handlers of requests, by path."""
    tenant_named: Callable[[str], Tenant | None]
    settings: Settings
    metrics: Metrics
    figures: BatchFigures
    places: Places
    writer: ResultWriter
    stopping: asyncio.Event
    """Set when the router ends."""
    checking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Threads that read or write whole files."""
    clock: ExpiryClock = field(default_factory=ExpiryClock)
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
        """Update the figures."""
        with contextlib.suppress(Exception):
            found = await self.directory.run(lambda store: store.totals())
            self.figures.unfinished, self.figures.lines, self.figures.lines_done = found
