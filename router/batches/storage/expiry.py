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

    While the router runs, wall time counts only as far as time has passed. Thus a clock that is set
    far ahead ends no batch and deletes no file, unless it stays so for `GRACE_S`: then it was
    behind before, for instance when the machine started. It may also be wrong when the router
    starts, so what has expired by then is kept for another `GRACE_S`, in which it may be corrected.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = lambda: time.clock_gettime(_BOOT_CLOCK),
    ) -> None:
        self._wall, self._elapsed = wall, elapsed
        self._started_at, self._started = wall(), elapsed()
        self._corrected_s = 0.0
        self._ahead_since: float | None = None

    def now(self) -> float:
        wall, now = self._wall(), self._elapsed()
        ahead_s = wall - (self._started_at + self._ran_s + self._corrected_s)
        if ahead_s < _TOLERANCE_S:
            self._ahead_since = None
        elif self._ahead_since is None:
            self._ahead_since = now
        elif now - self._ahead_since > GRACE_S:
            self._corrected_s += ahead_s
            self._ahead_since, ahead_s = None, 0.0
        return wall - max(0.0, ahead_s)

    def left_s(self, expires_at: float) -> float:
        """Return the seconds until ``expires_at``; not positive: it has expired."""
        left_s = expires_at - self.now()
        if expires_at <= self._started_at:
            return max(left_s, GRACE_S - self._ran_s)
        return left_s

    @property
    def oldest(self) -> float:
        """The wall time before which nothing expires at present."""
        return self._started_at if self._ran_s < GRACE_S else 0.0

    @property
    def _ran_s(self) -> float:
        return self._elapsed() - self._started
