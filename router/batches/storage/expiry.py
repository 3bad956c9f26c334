"""When batches and files expire."""

from __future__ import annotations

import time
from collections.abc import Callable

GRACE_S = 3600.0
_TOLERANCE_S = 60.0
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Counts while the machine sleeps, as CLOCK_MONOTONIC does on macOS."""


class ExpiryClock:
    """Compares with times that are on disk as wall time, although the wall clock may be wrong.

    It may be wrong when the router starts, and may be set far ahead while it runs. What has expired
    by then is kept for another `GRACE_S`, in which the clock may be corrected.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = lambda: time.clock_gettime(_BOOT_CLOCK),
    ) -> None:
        self._wall, self._elapsed = wall, elapsed
        self._last = wall(), elapsed()
        self._doubted, self._doubted_at = self._last
        """The wall time at the start or the last jump ahead, and the elapsed time then."""

    def now(self) -> float:
        """Return the wall time. Called about every minute, in order to notice that it was set."""
        (wall_before, before), (wall, now) = self._last, (self._wall(), self._elapsed())
        self._last = wall, now
        if wall - wall_before - (now - before) > _TOLERANCE_S:
            self._doubted, self._doubted_at = wall, now
        else:
            self._doubted = min(self._doubted, wall)  # it was set back
        return wall

    def left_s(self, expires_at: float) -> float:
        """Return the seconds until ``expires_at``; not positive: it has expired."""
        left_s = expires_at - self.now()
        return max(left_s, self._grace_s) if expires_at <= self._doubted else left_s

    @property
    def oldest(self) -> float:
        """The wall time before which nothing expires at present, as of the last `now`."""
        return self._doubted if self._grace_s > 0 else 0.0

    @property
    def _grace_s(self) -> float:
        return GRACE_S - (self._last[1] - self._doubted_at)
