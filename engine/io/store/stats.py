"""Counters of the kvstore client."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from shared import wire


@dataclass(frozen=True)
class StoreClientStats:
    """Blocks, states and bytes since the start."""

    reads: int = 0
    writes: int = 0
    drops: int = 0  # not stored, whether dropped by this client or by the kvstore
    corrupt: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    store: wire.StoreStats | None = None
    """The last figures of the kvstore itself, None while it is unavailable."""


class StoreCounters:
    """Thread-safe access to the figures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = StoreClientStats()

    @property
    def stats(self) -> StoreClientStats:
        with self._lock:
            return self._stats

    def add(self, **more: int) -> None:
        with self._lock:
            totals = {name: getattr(self._stats, name) + count for name, count in more.items()}
            self._stats = replace(self._stats, **totals)

    def set_store(self, store: wire.StoreStats | None) -> None:
        with self._lock:
            self._stats = replace(self._stats, store=store)
