"""Free space on the disk for blocks."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable

SETTLE_S = 10.0
"""How long a file system may take until deleted files show up as free space."""
SHRINK_PART = 16
"""If a disk is full despite free space (a quota), the tier shrinks by this fraction."""
SHRUNK_S = 60.0
"""How long the tier stays smaller before it grows again."""


class NoRoom(OSError):
    """There is no room for a block within the limits, whatever is evicted."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "no room beyond the space that the tier must leave free")


class DiskSpace:
    """How much to delete so that ``reserve_bytes`` stay free on the disk, and how much our files
    may use in total: ``max_bytes`` (0: no limit), or less if the disk has less.

    Some file systems (APFS) free the space of deleted files later, or not at all while a backup
    refers to them. Ignoring this would delete everything for nothing, so deleted files count as
    free space for `SETTLE_S`.
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
        self._removals: deque[tuple[float, int]] = deque()
        """When each file was removed, and its size, for `SETTLE_S`."""
        self._removed_bytes = 0
        self._shrunk_bytes = 0
        self._shrunk_until = float("-inf")

    def shortfall(self, incoming_bytes: int) -> int:
        """Return how much to delete before ``incoming_bytes`` are written; nothing if it is not
        positive."""
        while self._removals and self._removals[0][0] <= self._clock() - SETTLE_S:
            self._removed_bytes -= self._removals.popleft()[1]
        measured_bytes = self._measure()
        # Other programs write too: no more can be free than what was removed just now.
        most_bytes = measured_bytes + self._removed_bytes
        free_bytes = max(measured_bytes, min(self._expected_bytes, most_bytes))
        self._expected_bytes = free_bytes
        return self._reserve_bytes + incoming_bytes - free_bytes

    def removed(self, size_bytes: int) -> None:
        self._expected_bytes += size_bytes
        self._removed_bytes += size_bytes
        self._removals.append((self._clock(), size_bytes))

    def written(self, size_bytes: int) -> None:
        self._expected_bytes -= size_bytes

    def limit_bytes(self) -> int | None:
        """Return the current limit for our files, None if there is none."""
        limit = self.max_bytes or None
        if self._clock() < self._shrunk_until:
            return self._shrunk_bytes if limit is None else min(limit, self._shrunk_bytes)
        return limit

    def shrink(self, used_bytes: int, incoming_bytes: int) -> None:
        """Lower the limit for a while, because the disk had no room for ``incoming_bytes`` more."""
        self._removals.clear()  # the expected free space is not there
        self._removed_bytes = 0
        less = max(2 * incoming_bytes, used_bytes // SHRINK_PART)
        self._shrunk_bytes = max(incoming_bytes, used_bytes + incoming_bytes - less)
        self._shrunk_until = self._clock() + SHRUNK_S
