"""The room that the disk has for blocks."""

from __future__ import annotations

import time
from collections.abc import Callable

SETTLE_S = 10.0
"""How long a file system may take until removed files show as free space."""
SHRINK_PART = 16
"""A disk that is full although it has free space (a quota) takes this part of the tier less."""
SHRUNK_S = 60.0
"""How long the tier stays that small before it grows again."""


class DiskSpace:
    """How much must be removed so that ``reserve_bytes`` stay free on the disk, and how much our
    files may take together: ``max_bytes`` (0: no limit), or less where the disk takes less.

    Some file systems (APFS) free the space of removed files later, or not at all where a backup
    still refers to them. Without regard to that, everything would be removed in vain. So for
    `SETTLE_S` what was removed counts as free.
    """

    def __init__(
        self,
        measure: Callable[[], int],
        max_bytes: int,
        reserve_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self.max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        self._clock = clock
        self._expected_bytes = 0
        self._settled_at = float("-inf")
        self._shrunk_bytes = 0
        self._shrunk_until = float("-inf")

    def shortfall(self, incoming_bytes: int) -> int:
        """Return what must be removed before ``incoming_bytes`` are written; nothing if it is not
        positive."""
        free_bytes = self._measure()
        if self._clock() < self._settled_at:
            free_bytes = max(free_bytes, self._expected_bytes)
        self._expected_bytes = free_bytes
        return self._reserve_bytes + incoming_bytes - free_bytes

    def removed(self, size_bytes: int) -> None:
        self._expected_bytes += size_bytes
        self._settled_at = self._clock() + SETTLE_S

    def written(self, size_bytes: int) -> None:
        self._expected_bytes -= size_bytes

    def limit_bytes(self) -> int | None:
        """Return the most that our files may take now, None for no limit."""
        limit = self.max_bytes or None
        if self._clock() < self._shrunk_until:
            return self._shrunk_bytes if limit is None else min(limit, self._shrunk_bytes)
        return limit

    def shrink(self, used_bytes: int, incoming_bytes: int) -> None:
        """Lower the limit for a while, since the disk had no room for ``incoming_bytes`` more."""
        self._settled_at = float("-inf")  # what should be free is not
        less = max(2 * incoming_bytes, used_bytes // SHRINK_PART)
        self._shrunk_bytes = max(incoming_bytes, used_bytes + incoming_bytes - less)
        self._shrunk_until = self._clock() + SHRUNK_S
