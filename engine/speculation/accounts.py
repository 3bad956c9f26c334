"""What drafts cost and save in measured time, and the limits of that.

A sequence loses time if drafts, its own or others', make its steps longer. It saves one step for
each of its accepted drafts. Two accounts limit the loss: one per sequence, which no sequence's
drafts may overdraw, and one per source of its drafts. Totals by source are for metrics."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from shared.wire import DraftCounts

MAX_STEPS, MAX_SHARE = 1.0, 0.015
"""A sequence loses at most two steps without drafts, or 3 % of the time its steps would have
taken without drafts, whichever is larger. These limits are lower than that, because steps may
take longer than predicted."""
EARLY_STEPS, EARLY_SHARE = 0.5, 0.03
"""While a sequence is short, it loses at most so many steps and this share of its time: two steps
are a tenth of an answer of twenty tokens."""
FIRST_STEPS, LATER_SHARE = 0.6, 1 / 300
"""The same for one source and its own drafts: less than 2 % of 64 tokens and less than 1 % of
256, with a margin for steps that take longer than predicted."""
AT_ONCE = 0.4
"""Max part of that limit that drafts may risk at once: a source whose first draft is wrong has
enough left for others."""
MAX_SAVED_STEPS = 3.0
"""Max savings of a source that may pay for later drafts. A source that becomes wrong after
hundreds of correct tokens thus stops as soon as any other."""
GIVEN_BACK, MAX_GIVEN_STEPS = 0.1, 0.75
"""Steps that a source that lost time may lose again for each token that it guessed right without
verification. A sequence may too, but only this many in total."""
EARNED_STEPS = 1.5
"""Steps that right guesses may pay for, where a step with drafts costs much because the device
waits."""
FIRST_SILENCE, LONGEST_SILENCE = 16, 1024
"""Number of tokens for which an overdrawn source proposes nothing. It doubles each time, and
starts again once the source has saved time."""


@dataclass(slots=True)
class SequenceAccount:
    """The cost of all sequences' drafts to one sequence."""

    without_s: float = 0.0
    """Time that its tokens would have taken without drafts."""
    lost_s: float = 0.0
    """Negative if drafts saved time."""
    given_s: float = 0.0
    """Additional time that it may lose, because guesses that were not verified were right."""

    def step(self, plain_s: float, excess_s: float) -> None:
        """Record a step that would have taken ``plain_s``, and took ``excess_s`` longer."""
        self.without_s += plain_s
        self.lost_s += excess_s

    def save(self, steps: int, plain_s: float) -> None:
        """Record that ``steps`` steps of ``plain_s`` are saved by accepted drafts."""
        self.without_s += steps * plain_s
        self.lost_s -= steps * plain_s

    def guessed(self, right: int, plain_s: float) -> None:
        """Record that the first ``right`` tokens of a guess that was not verified were right, in
        steps of ``plain_s``."""
        given_s = self.given_s + right * GIVEN_BACK * plain_s
        self.given_s = min(given_s, MAX_GIVEN_STEPS * plain_s)

    def room_s(self, plain_s: float) -> float:
        """Return how much longer than ``plain_s`` the next step may take."""
        early_s = EARLY_STEPS * plain_s + EARLY_SHARE * self.without_s
        return (
            max(min(MAX_STEPS * plain_s, early_s), MAX_SHARE * self.without_s)
            - self.lost_s
            + self.given_s
        )


@dataclass(slots=True)
class SourceAccount:
    """The cost of one source's drafts for one sequence to all sequences in its steps, minus
    their savings."""

    balance_s: float = 0.0
    """Savings minus costs; negative if drafts cost more."""
    is_new: bool = True
    """Whether none of its drafts has been verified yet."""
    silence: int = FIRST_SILENCE
    """Number of tokens of its next silence."""
    silent_until: int = 0
    """Number of the sequence's tokens from which it proposes again."""

    def spend(self, seconds: float) -> None:
        self.balance_s -= seconds

    def verified(self, cost_s: float, saved_s: float, plain_s: float) -> None:
        """Record the costs and savings of drafts, in steps of ``plain_s``."""
        self.is_new = False
        balance_s = self.balance_s - cost_s + saved_s
        self.balance_s = min(balance_s, MAX_SAVED_STEPS * plain_s)
        if self.balance_s > 0:
            self.silence = FIRST_SILENCE

    def room_s(self, plain_s: float, without_s: float) -> float:
        """Return what it may lose from now on, in steps of ``plain_s``, for a sequence that
        would have taken ``without_s`` so far without drafts."""
        return self.balance_s + _limit_s(plain_s, without_s)

    def stake_s(self, plain_s: float, without_s: float) -> float:
        """Return the max cost of its next drafts, if they cost more than a single one: all
        savings, and a part of what it may lose besides."""
        room_s = self.room_s(plain_s, without_s)
        return room_s - (1 - AT_ONCE) * min(room_s, _limit_s(plain_s, without_s))

    def is_silent(self, num_tokens: int) -> bool:
        """Return whether it proposes nothing at this number of tokens of the sequence."""
        return num_tokens < self.silent_until

    def guessed(self, right: int, plain_s: float, max_steps: float) -> None:
        """Record that the first ``right`` tokens of a guess that was not verified were right, in
        steps of ``plain_s``. Its silence ends if there are any. Its balance grows up to
        ``max_steps``: above 0 for drafts that cost much, whatever their number."""
        if right:
            lacking_s = max(0.0, max_steps * plain_s - self.balance_s)
            self.balance_s += min(right * GIVEN_BACK * plain_s, lacking_s)
            self.silence, self.silent_until = FIRST_SILENCE, 0

    def begin_silence(self, num_tokens: int) -> None:
        """Record that its account cannot pay for a draft at this number of tokens."""
        self.silent_until = num_tokens + self.silence
        self.silence = min(2 * self.silence, LONGEST_SILENCE)


def _limit_s(plain_s: float, without_s: float) -> float:
    return FIRST_STEPS * plain_s + LATER_SHARE * without_s


class VerifiedStep(NamedTuple):
    """The step whose drafts are verified next."""

    rows: int
    plain_s: float  # time it would have taken without drafts
    draft_s: float  # extra time that each of its drafts is charged
    measured_draft_s: float | None
    """Extra time of each of its drafts as measured; None: it also computed chunks."""

    def verified(
        self, sequence: SequenceAccount, source: SourceAccount, drafted: int, accepted: int
    ) -> None:
        """Record the outcome of the drafts of one sequence. The whole step waited for them."""
        cost_s, saved_s = self.rows * drafted * self.draft_s, accepted * self.plain_s
        sequence.save(accepted, self.plain_s)
        source.verified(cost_s, saved_s, self.plain_s)

    def saved_s(self, drafted: int, accepted: int) -> float:
        """Return what drafts of one sequence saved, as measured; 0 if that is unknown. An accepted
        draft saves one row of a step without drafts."""
        if self.measured_draft_s is None:
            return 0.0
        return accepted * self.plain_s / self.rows - drafted * self.measured_draft_s


class SourceTotals:
    """Totals of all sequences by source, for metrics."""

    def __init__(self) -> None:
        self._by_source: dict[str, DraftCounts] = defaultdict(DraftCounts)

    def verified(self, source: str, drafted: int, accepted: int, saved_s: float) -> None:
        """Record that ``accepted`` of ``drafted`` tokens were accepted, which saved so much."""
        totals = self._by_source[source]
        self._by_source[source] = replace(
            totals,
            proposals=totals.proposals + 1,
            drafted=totals.drafted + drafted,
            accepted=totals.accepted + accepted,
            saved_s=totals.saved_s + saved_s,
        )

    def spent(self, source: str, seconds: float) -> None:
        """Record the time taken to ask ``source`` for drafts."""
        totals = self._by_source[source]
        self._by_source[source] = replace(
            totals, spent_s=totals.spent_s + seconds, saved_s=totals.saved_s - seconds
        )

    def counts(self) -> dict[str, DraftCounts]:
        return dict(self._by_source)
