"""How running streams and prompts share the time of the device."""

from __future__ import annotations

DEFAULT_STREAMS_SHARE = 0.5
BACKGROUND_PART = 0.25
"""Prompts of the background get this part of what other prompts may take of streams' time."""
MOST_OWED_S = 2.0
"""The most that one side owes the other. What is more is forgotten."""


class TimeShare:
    """Accounts for the time of steps while streams run and prompts are computed."""

    def __init__(self, streams_share: float = DEFAULT_STREAMS_SHARE) -> None:
        """``streams_share`` is the part of the time that streams get, between 0 and 1."""
        self._ratio = (1 - streams_share) / streams_share
        self._balance_s = 0.0
        """What prompts may take after all that was measured."""
        self._planned_s = 0.0
        """Predicted for stretches that are planned, and not measured yet."""
        self._prompts_last = False
        self.of_background = False
        """Whether all prompts are of the background, and not all streams."""

    @property
    def owed_s(self) -> float:
        """Seconds that prompts may take now; negative if they took more than their part."""
        return self._balance_s - self._planned_s

    def is_turn_of_prompts(self, stretch_s: float) -> bool:
        """Return whether prompts may take ``stretch_s`` now.

        Sums of both sides are never equal. After a decode step half of it has to be there, after
        another stretch all of it, so that two in a row, which streams notice, are rare."""
        return self.owed_s >= min(stretch_s if self._prompts_last else stretch_s / 2, MOST_OWED_S)

    def decoded(self, seconds: float) -> None:
        """Note a decode step that was computed while prompts waited."""
        ratio = self._ratio * (BACKGROUND_PART if self.of_background else 1)
        self._balance_s = min(self._balance_s + seconds * ratio, MOST_OWED_S)
        self._prompts_last = False

    def planned(self, seconds: float) -> None:
        """Note a stretch that is predicted to take so long while streams wait. With look-ahead the
        next plan is made before its time is known."""
        self._planned_s += seconds

    def computed(self, seconds: float, planned_s: float) -> None:
        """Note the time of a stretch while streams waited. ``planned_s`` was predicted for it."""
        self._planned_s = max(0.0, self._planned_s - planned_s)
        self._balance_s = max(self._balance_s - seconds, -MOST_OWED_S)
        self._prompts_last = True

    def clear(self) -> None:
        """Begin anew: there are no streams, or no prompts."""
        self._balance_s = 0.0

    def forget_planned(self) -> None:
        """Forget stretches in flight: their times never come."""
        self._planned_s = 0.0
