"""How many engines a model is to have: between --engines and --max-engines, by its queue."""

from __future__ import annotations

from shared.settings import Settings

UP_AFTER_S = 2.0
"""How long the queue has to be long: the first tokens of a burst may only wait for its prompts."""
BUSY_SHARE = 0.7
"""The part of their places that the others may have taken once an engine has ended."""


class Scaling:
    """Follows the load of one model. Times are of ``time.monotonic``."""

    def __init__(self, engines: int) -> None:
        self.wanted = engines
        self._queued, self._busy = 0, 0.0
        self._short_since: float | None = None
        self._spare_since: float | None = None

    def note_load(self, queued: int = 0, busy: float = 0.0) -> None:
        """Note the requests in the queue, and the part of all engines' places that is taken."""
        self._queued, self._busy = queued, busy

    def follow(self, settings: Settings, ready: int, now: float) -> str | None:
        """Bring ``wanted`` up to date; return a line for the log if it has changed.

        An engine is added at a time, and the next when it is ready: so a queue that one engine
        clears does not start ten.
        """
        least, most = settings.engines, settings.max_engines or settings.engines
        before = self.wanted
        self.wanted = min(max(self.wanted, least), most)
        short = ready >= self.wanted and self._queued >= settings.scale_up_queue * ready > 0
        left = self.wanted - 1
        spare = not self._queued and self._busy * ready <= BUSY_SHARE * min(left, ready)
        self._short_since = (self._short_since or now) if short and before < most else None
        self._spare_since = (self._spare_since or now) if spare and before > least else None
        if self._short_since is not None and now - self._short_since >= UP_AFTER_S:
            self.wanted, self._short_since = self.wanted + 1, None
            return f"{self._queued} requests wait: {self.wanted} engines and not {before}"
        if self._spare_since is not None and now - self._spare_since >= settings.scale_down_s:
            self.wanted, self._spare_since = left, None
            return f"{left} engines are enough, and not {before}"
        return None
