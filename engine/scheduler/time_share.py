"""How running streams and prompts share the time of the device."""

from __future__ import annotations

DEFAULT_STREAMS_SHARE = 0.5
MOST_OWED_S = 2.0
"""The most that one side owes the other. What is more is forgotten."""


class TimeShare:
    """Accounts for the time of steps while streams run and prompts are computed."""

    def __init__(self, streams_share: float = DEFAULT_STREAMS_SHARE) -> None:
        """``streams_share`` is the part of the time that streams get, between 0 and 1."""
        self._ratio = (1 - streams_share) / streams_share
        self.owed_s = 0.0
        """Seconds that prompts may take now; negative if they took more than their part."""
        self._prompts_last = False

    def is_turn_of_prompts(self, stretch_s: float) -> bool:
        """Return whether prompts may take ``stretch_s`` now.

        Sums of both sides are never equal. After a decode step half of it has to be there, after
        another stretch all of it, so that two in a row, which streams notice, are rare."""
        return self.owed_s >= min(stretch_s if self._prompts_last else stretch_s / 2, MOST_OWED_S)

    def decoded(self, seconds: float) -> None:
        """Note a decode step that was computed while prompts waited."""
        self.owed_s = min(self.owed_s + seconds * self._ratio, MOST_OWED_S)
        self._prompts_last = False

    def computed(self, seconds: float) -> None:
        """Note a stretch of prompts that was computed while streams waited."""
        self.owed_s = max(self.owed_s - seconds, -MOST_OWED_S)
        self._prompts_last = True

    def clear(self) -> None:
        """Begin anew: there are no streams, or no prompts."""
        self.owed_s = 0.0
