"""Acceptance rates of drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from engine.speculation.source import Proposal

DECAY = 0.9
"""Weight of the existing estimate after each verification."""
FADE = 0.995
"""The same after each proposal that did not pay off, so that others are tried in time."""
ASSUMED_WEIGHT = 4.0
"""Number of tokens for which an assumption counts."""
MIN_CHANCE = 0.01
"""Drafts with a lower chance are not considered: no step is cheap enough for them."""


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


OwnRates: TypeAlias = dict[tuple[str, int], AcceptanceRate]
"""The rates of one sequence, by source and kind of token."""


class AcceptanceRates:
    """The rates of all sequences together, used beside those of each."""

    def __init__(self, *, by_sequence: bool) -> None:
        """``by_sequence``: whether a sequence's own rates count."""
        self._by_sequence = by_sequence
        self._all: OwnRates = {}

    def chances(self, own: OwnRates, proposal: Proposal) -> list[float]:
        """Return the chance that each token of ``proposal`` and all before it are accepted, down
        to `MIN_CHANCE`."""
        chances, chance = [], 1.0
        rates: dict[int, float] = {}
        for index in range(len(proposal.tokens)):
            if (kind := proposal.kind(index)) not in rates:
                of_sequence, common = self.of(own, proposal, kind)
                rate = common.rate()
                rates[kind] = of_sequence.rate(rate) if self._by_sequence else rate
            chance *= rates[kind]
            if chance < MIN_CHANCE:
                break
            chances.append(chance)
        return chances

    def learn(
        self, own: OwnRates, proposal: Proposal, tried: int, right: int, *, verified: bool
    ) -> None:
        """Record that the first ``right`` tokens of ``proposal`` came, and the first ``tried`` are
        known. Only ``verified`` ones count for other sequences."""
        by_kind = Counter(proposal.kind(index) for index in range(tried))
        right_by_kind = Counter(proposal.kind(index) for index in range(right))
        for kind, count in by_kind.items():
            for rate in self.of(own, proposal, kind)[: 1 + verified]:
                rate.observe(count, right_by_kind[kind])

    def fade(self, doubtful: Iterable[tuple[OwnRates, Proposal]]) -> None:
        """Record that these proposals were not worth while: once per shared rate, regardless of
        the number of sequences."""
        rates = {
            id(rate): rate
            for own, proposal in doubtful
            for rate in self.of(own, proposal, proposal.kind(0))
        }
        for rate in rates.values():
            rate.fade()

    def of(
        self, own: OwnRates, proposal: Proposal, kind: int
    ) -> tuple[AcceptanceRate, AcceptanceRate]:
        """Return the sequence's own rate for tokens of ``kind``, and the rate of all sequences."""
        key = proposal.source, kind
        for rates in (own, self._all):
            if key not in rates:
                rates[key] = AcceptanceRate(proposal.likely[kind])
        return own[key], self._all[key]

    def known(self) -> dict[str, float]:
        """Return the rates of all sequences together, by names like ``source/kind``."""
        return {f"{source}/{kind}": rate.rate() for (source, kind), rate in self._all.items()}
