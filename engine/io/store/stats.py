"""What the client of the kvstore counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from shared import wire


@dataclass(frozen=True)
class StoreClientStats:
    """Blocks, states and bytes since the start."""

    reads: int = 0
    writes: int = 0
    drops: int = 0  # those that were not stored, whether this client or the kvstore dropped them
    corrupt: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    store: wire.StoreStats | None = None
    """The last figures of the kvstore itself, None while it is away."""


class StoreCounters:
    """The figures, which may be read and changed from any thread."""

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
