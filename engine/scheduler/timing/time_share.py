"""How running streams and prompts share the time of the device, and short work and long."""

from __future__ import annotations

DEFAULT_STREAMS_SHARE = 0.5
BACKGROUND_PART = 0.25
"""Fraction of other prompts' share of the streams' time that background prompts get."""
MAX_BALANCE_S = 2.0
"""Max balance, of either sign. Anything beyond it is forgotten."""
MUCH_SHORTER = 4
"""Work overtakes what is at least this many times as long."""
MAX_LEAD_S = 0.5
"""How much more time the overtaking get than the overtaken. After that they alternate."""


class TimeShare:
    """Accounts for the time of steps while streams run and prompts are computed."""

    def __init__(self, streams_share: float = DEFAULT_STREAMS_SHARE) -> None:
        """``streams_share`` is the fraction of the time for streams, between 0 and 1."""
        self._ratio = (1 - streams_share) / streams_share
        self._balance_s = 0.0
        """Time that prompts may take after everything measured."""
        self._planned_s = 0.0
        """Predicted time of planned stretches that are not measured yet."""
        self._prompts_last = False
        self.of_background = False
        """Whether all prompts are background work, and not all streams are."""

    @property
    def available_s(self) -> float:
        """Seconds that prompts may take now; negative if they took more than their share."""
        return self._balance_s - self._planned_s

    def is_turn_of_prompts(self, stretch_s: float) -> bool:
        """Return whether prompts may take ``stretch_s`` now.

        The totals of both sides are never equal. After a decode step, half of the stretch must be
        available, after another stretch all of it, so that two in a row, which streams notice, are
        rare."""
        return self.available_s >= min(
            stretch_s if self._prompts_last else stretch_s / 2, MAX_BALANCE_S
        )

    def decoded(self, seconds: float) -> None:
        """Record a decode step that was computed while prompts waited."""
        ratio = self._ratio * (BACKGROUND_PART if self.of_background else 1)
        self._balance_s = min(self._balance_s + seconds * ratio, MAX_BALANCE_S)
        self._prompts_last = False

    def planned(self, seconds: float) -> None:
        """Record the predicted time of a stretch while streams wait. With look-ahead, the next plan
        is made before its actual time is known."""
        self._planned_s += seconds

    def computed(self, seconds: float, planned_s: float) -> None:
        """Record the time of a stretch while streams waited. ``planned_s`` was predicted for it."""
        self._planned_s = max(0.0, self._planned_s - planned_s)
        self._balance_s = max(self._balance_s - seconds, -MAX_BALANCE_S)
        self._prompts_last = True

    def clear(self) -> None:
        """Start again, because there are no streams or no prompts."""
        self._balance_s = 0.0

    def forget_planned(self) -> None:
        """Forget stretches in flight, because their times will never be known."""
        self._planned_s = 0.0


class Lead:
    """The time given to overtaking work, minus the time given since to the overtaken."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def is_used_up(self) -> bool:
        """Whether the overtaken has its turn."""
        return self._seconds >= MAX_LEAD_S

    def count(self, seconds: float, *, of_overtaken: bool) -> None:
        self._seconds = max(0.0, self._seconds + (-seconds if of_overtaken else seconds))

    def clear(self) -> None:
        """Start again, because the overtaken is done."""
        self._seconds = 0.0
