"""How often drafts are accepted."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9
"""Part of what is known that counts after each verification."""
FADE = 0.995
"""The same after each proposal that was not worth while, so that others are tried in time."""
ASSUMED_WEIGHT = 4.0
"""How many tokens an assumption counts as."""


@dataclass(slots=True)
class AcceptanceRate:
    """A moving average over verifications: how likely a draft is accepted if all before it were.
    Drafts after one that is not accepted say nothing."""

    assumed: float
    tried: float = 0.0
    accepted: float = 0.0

    def rate(self, assumed: float | None = None) -> float:
        """Return it. As long as little is known, ``assumed`` counts."""
        base = self.assumed if assumed is None else assumed
        return (self.accepted + ASSUMED_WEIGHT * base) / (self.tried + ASSUMED_WEIGHT)

    def observe(self, tried: int, accepted: int) -> None:
        """Note that ``accepted`` of ``tried`` tokens were, all before which were accepted."""
        self.tried = DECAY * self.tried + tried
        self.accepted = DECAY * self.accepted + accepted

    def fade(self) -> None:
        """Note that nothing was verified since it did not seem worth while."""
        self.tried *= FADE
        self.accepted *= FADE
