"""How long the event loop stands still."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from prometheus_client import Histogram

EVERY_S = 0.02
WINDOW_S = 60.0


class LoopLag:
    """Measures how much later than it should the event loop wakes a task, fifty times a second.

    ``histogram`` gets each of these times. Meanwhile no stream and no probe is answered.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._worst: deque[tuple[float, float]] = deque()
        """(time, lag): each with a lag over all that came later. The first one is the worst."""

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.observe(time.monotonic(), time.monotonic() - due)

    def observe(self, now: float, lag_s: float) -> None:
        self._histogram.observe(max(lag_s, 0.0))
        while self._worst and self._worst[-1][1] <= lag_s:
            self._worst.pop()
        self._worst.append((now, lag_s))
        while self._worst[0][0] < now - WINDOW_S:
            self._worst.popleft()

    def worst_s(self) -> float:
        """Return the longest lag of the last minute."""
        return self._worst[0][1] if self._worst else 0.0
