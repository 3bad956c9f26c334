"""Measures how long the event loop is blocked."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Histogram

EVERY_S = 0.02
WINDOW_S = 60.0
LINGER_S = 0.5
"""The measurement continues this long after the last request, because another one may follow."""


class LoopLag:
    """Measures how late the event loop calls a timer, fifty times per second while there are
    requests. During such a delay no stream and no probe is answered.

    An idle server is not woken for it. ``histogram`` gets each measured delay."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._worst: deque[tuple[float, float]] = deque()
        """(time, lag): each with a lag above all later ones. The first one is the worst."""
        self._requests = 0
        self._lingers_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside this context, a request is served and the lag is measured, including the
        request's first piece of work."""
        self._requests += 1
        if self._timer is None:
            self._arm()
        try:
            yield
        finally:
            self._requests -= 1
            self._lingers_until = time.monotonic() + LINGER_S

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def observe(self, now: float, lag_s: float) -> None:
        self._histogram.observe(max(lag_s, 0.0))
        while self._worst and self._worst[-1][1] <= lag_s:
            self._worst.pop()
        self._worst.append((now, lag_s))
        while self._worst[0][0] < now - WINDOW_S:
            self._worst.popleft()

    def worst_s(self) -> float:
        """Return the longest lag of the last minute."""
        while self._worst and self._worst[0][0] < time.monotonic() - WINDOW_S:
            self._worst.popleft()
        return self._worst[0][1] if self._worst else 0.0

    def _arm(self) -> None:
        due = time.monotonic() + EVERY_S
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._measure, due)

    def _measure(self, due: float) -> None:
        now = time.monotonic()
        self.observe(now, now - due)
        self._timer = None
        if self._requests or now < self._lingers_until:
            self._arm()
