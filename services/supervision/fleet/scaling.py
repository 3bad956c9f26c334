"""The number of engines of a model, between --engines and --max-engines, from its queue."""

from __future__ import annotations

from shared.settings import Settings

UP_QUEUE = 4
"""Queued requests per engine at which another engine is started."""
UP_AFTER_S = 2.0
"""How long the queue must be long: the first tokens of a burst may only be waiting for
its prompts."""
BUSY_SHARE = 0.7
"""Max fraction of the other engines' capacity in use after an engine is stopped."""


class Scaling:
    """Follows the load of one model. Times are from ``time.monotonic``."""

    def __init__(self, engines: int) -> None:
        self.wanted = engines
        self._queued, self._busy = 0, 0.0
        self._short_since: float | None = None
        self._spare_since: float | None = None

    def note_load(self, queued: int = 0, busy: float = 0.0) -> None:
        """Record the number of queued requests, and the fraction of all engines'
        capacity in use."""
        self._queued, self._busy = queued, busy

    def follow(self, settings: Settings, ready: int, now: float) -> str | None:
        """Update ``wanted``; return a line for the log if it has changed.

        Engines are added one at a time, the next when the previous one is ready: a queue that one
        engine clears does not start ten.
        """
        least, most = settings.engines, settings.max_engines or settings.engines
        before = self.wanted
        self.wanted = min(max(self.wanted, least), most)
        short = ready >= self.wanted and self._queued >= UP_QUEUE * ready > 0
        left = self.wanted - 1
        spare = not self._queued and self._busy * ready <= BUSY_SHARE * min(left, ready)
        self._short_since = (self._short_since or now) if short and before < most else None
        self._spare_since = (self._spare_since or now) if spare and before > least else None
        if self._short_since is not None and now - self._short_since >= UP_AFTER_S:
            self.wanted, self._short_since = self.wanted + 1, None
            return f"{self._queued} requests queued: scaling from {before} to {self.wanted} engines"
        if self._spare_since is not None and now - self._spare_since >= settings.scale_down_s:
            self.wanted, self._spare_since = left, None
            return f"idle capacity: scaling from {before} to {left} engines"
        return None
