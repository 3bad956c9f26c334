"""Acceptance rates of drafts."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.9
"""Weight of the existing estimate after each verification."""
FADE = 0.995
"""The same after each proposal that did not pay off, so that others are tried in time."""
ASSUMED_WEIGHT = 4.0
"""Number of tokens for which an assumption counts."""


@dataclass(slots=True)
class AcceptanceRate:
    """A moving average over verifications: the probability that a draft is accepted if all before
    it were. Drafts after a rejected one have no information."""

    assumed: float
    tried: float = 0.0
    accepted: float = 0.0

    def rate(self, assumed: float | None = None) -> float:
        """Return the estimate. As long as little is known, ``assumed`` counts."""
        base = self.assumed if assumed is None else assumed
        return (self.accepted + ASSUMED_WEIGHT * base) / (self.tried + ASSUMED_WEIGHT)

    def observe(self, tried: int, accepted: int) -> None:
        """Record that ``accepted`` of ``tried`` tokens were accepted, after all before
        them were."""
        self.tried = DECAY * self.tried + tried
        self.accepted = DECAY * self.accepted + accepted

    def fade(self) -> None:
        """Record that nothing was verified because it did not seem to pay off."""
        self.tried *= FADE
        self.accepted *= FADE
