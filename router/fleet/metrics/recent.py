"""Recent events for display: first tokens, errors and losses. Bounded, in memory only."""

from __future__ import annotations

import time
from collections import Counter, deque
from itertools import chain

from msgspec import Struct

WINDOW_S = 60.0
_MAX_TIMES = 256
"""Max per model, because the feed sorts them once per second."""
_MAX_INCIDENTS = 50


class Incident(Struct, kw_only=True):
    """An error, or an engine that came or went."""

    at: float  # time of the last occurrence, in seconds since the epoch
    subject: str  # an engine's name, or the path of a request
    what: str
    is_error: bool
    count: int = 1  # number of consecutive occurrences
    request_id: str | None = None  # request id of the last occurrence, as in the log


class Percentiles(Struct, frozen=True, kw_only=True):
    """First-token times within the last `WINDOW_S`."""

    count: int
    p50: float  # seconds
    p95: float

    @classmethod
    def of(cls, values: list[float]) -> Percentiles:
        """Return the percentiles of sorted ``values``, of which there is at least one."""
        last = len(values) - 1
        return cls(count=len(values), p50=values[round(0.5 * last)], p95=values[round(0.95 * last)])


class Recent:
    """Observed only on the event loop."""

    def __init__(self) -> None:
        self.losses: Counter[str] = Counter()
        """Number of losses by engine."""
        self._first_tokens: dict[str, deque[tuple[float, float]]] = {}
        self._incidents: deque[Incident] = deque(maxlen=_MAX_INCIDENTS)

    @property
    def incidents(self) -> list[Incident]:
        """The last events, newest first."""
        return list(reversed(self._incidents))

    def note(
        self, subject: str, what: str, *, is_error: bool = True, request_id: str | None = None
    ) -> None:
        """Record that ``what`` happened to ``subject``. A repetition only increases the count."""
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
        """Record the ``seconds`` from admission to a first token at ``now``."""
        times = self._first_tokens.get(model)
        if times is None:
            times = self._first_tokens[model] = deque(maxlen=_MAX_TIMES)
        times.append((now, seconds))

    def first_tokens(self) -> tuple[Percentiles | None, dict[str, Percentiles]]:
        """Return the times of all models together, and of each model with any."""
        since = time.monotonic() - WINDOW_S
        found: dict[str, list[float]] = {}
        for model, times in self._first_tokens.items():
            while times and times[0][0] < since:
                times.popleft()
            if times:
                found[model] = sorted(seconds for _, seconds in times)
        if not found:
            return None, {}
        together = sorted(chain.from_iterable(found.values()))  # fast, because its parts are sorted
        return Percentiles.of(together), {name: Percentiles.of(v) for name, v in found.items()}
