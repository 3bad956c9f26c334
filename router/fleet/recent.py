"""What happened lately, for people: first tokens, errors and losses. Bounded, in memory only."""

from __future__ import annotations

import time
from collections import Counter, deque

from msgspec import Struct

WINDOW_S = 60.0
_MAX_TIMES = 256
"""Of each model: the feed sorts them once a second."""
_MAX_INCIDENTS = 50


class Incident(Struct, kw_only=True):
    """Something that went wrong, or an engine that came or went."""

    at: float  # seconds since the epoch, of the last time
    subject: str  # an engine's name, or the path of a request
    what: str
    is_error: bool
    count: int = 1  # so often, one after the other
    request_id: str | None = None  # of the last one, as in the log


class Percentiles(Struct, frozen=True, kw_only=True):
    """Of the times in the last `WINDOW_S`."""

    count: int
    p50: float  # seconds
    p95: float


class Recent:
    """Observed on the event loop only."""

    def __init__(self) -> None:
        self.losses: Counter[str] = Counter()
        """How often each engine was lost."""
        self._first_tokens: dict[str, deque[tuple[float, float]]] = {}
        self._incidents: deque[Incident] = deque(maxlen=_MAX_INCIDENTS)

    @property
    def incidents(self) -> list[Incident]:
        """The last ones, the newest first."""
        return list(reversed(self._incidents))

    def note(
        self, subject: str, what: str, *, is_error: bool = True, request_id: str | None = None
    ) -> None:
        """Remember that ``what`` happened to ``subject``. Repeated, it takes no further place."""
        found = next((x for x in self._incidents if (x.subject, x.what) == (subject, what)), None)
        count = 1
        if found is not None:
            self._incidents.remove(found)
            count += found.count
        self._incidents.append(
            Incident(
                at=time.time(),
                subject=subject,
                what=what,
                is_error=is_error,
                count=count,
                request_id=request_id,
            )
        )

    def on_first_token(self, model: str, now: float, seconds: float) -> None:
        """Take the ``seconds`` from admission to a first token, which came at ``now``."""
        times = self._first_tokens.get(model)
        if times is None:
            times = self._first_tokens[model] = deque(maxlen=_MAX_TIMES)
        times.append((now, seconds))

    def first_token(self, model: str | None = None) -> Percentiles | None:
        """Return those of a model, or of all; None if there were none."""
        since = time.monotonic() - WINDOW_S
        some = self._first_tokens.values() if model is None else [self._first_tokens.get(model, ())]
        values = sorted(seconds for times in some for at, seconds in times if at >= since)
        if not values:
            return None
        last = len(values) - 1
        return Percentiles(
            count=len(values), p50=values[round(0.5 * last)], p95=values[round(0.95 * last)]
        )
