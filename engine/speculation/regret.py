"""What drafts cost one sequence, in measured time, and what they may still cost it.

A sequence loses what its steps take longer since drafts, its own or others', are verified in them,
and saves a step with each of its drafts that is accepted. Two accounts bound that: one of the
sequence, which no draft of any sequence may overdraw, and one for each source of its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_STEPS, MOST_SHARE = 1.25, 0.02
"""No sequence loses more to drafts than the larger of two steps without drafts and 3 % of the time
that its steps would have taken without any. These are less, since a step may take longer than
was predicted."""
FIRST_STEPS, LATER_SHARE = 0.4, 1 / 200
"""The same of one source with its own drafts: less than 2 % of 64 tokens and less than 1 % of 256,
with room for steps that take longer than was predicted."""
MOST_SAVED_STEPS = 3.0
"""What a source has saved pays for later drafts, but no more than this: one that turns wrong after
hundreds of right tokens stops as soon."""
FIRST_SILENCE, LONGEST_SILENCE = 16, 1024
"""A source whose account is used up proposes nothing for so many tokens, each time twice as many;
as few as at first once it has saved something."""


@dataclass(slots=True)
class SequenceAccount:
    """What drafts of all sequences cost one of them."""

    without_s: float = 0.0
    """What its tokens would have taken without drafts."""
    lost_s: float = 0.0
    """Below zero if drafts saved time."""

    def step(self, plain_s: float, excess_s: float) -> None:
        """Note a step that would have taken ``plain_s``, and took ``excess_s`` longer."""
        self.without_s += plain_s
        self.lost_s += excess_s

    def save(self, steps: int, plain_s: float) -> None:
        """Note that so many steps of ``plain_s`` are not needed, since drafts were accepted."""
        self.without_s += steps * plain_s
        self.lost_s -= steps * plain_s

    def room_s(self, plain_s: float) -> float:
        """Return what the next step may take longer than ``plain_s``."""
        return max(MOST_STEPS * plain_s, MOST_SHARE * self.without_s) - self.lost_s


@dataclass(slots=True)
class SourceAccount:
    """What the drafts of one source for one sequence cost all sequences of its steps, less what
    they saved."""

    balance_s: float = 0.0
    """What they saved; below zero if they cost more."""
    is_new: bool = True
    """Whether none of its drafts was verified."""
    silence: int = FIRST_SILENCE
    """How many tokens it will propose nothing when its account is used up the next time."""
    silent_until: int = 0
    """The number of tokens of the sequence from which it proposes again."""

    def spend(self, seconds: float) -> None:
        self.balance_s -= seconds

    def verified(self, cost_s: float, saved_s: float, plain_s: float) -> None:
        """Note that drafts cost so much and saved so much, in steps of ``plain_s``."""
        self.is_new = False
        balance_s = self.balance_s - cost_s + saved_s
        self.balance_s = min(balance_s, MOST_SAVED_STEPS * plain_s)
        if self.balance_s > 0:
            self.silence = FIRST_SILENCE

    def room_s(self, plain_s: float, without_s: float) -> float:
        """Return what the next drafts may cost, in steps of ``plain_s``, of a sequence that would
        have taken ``without_s`` so far."""
        return self.balance_s + FIRST_STEPS * plain_s + LATER_SHARE * without_s

    def is_silent(self, num_tokens: int) -> bool:
        """Return whether it proposes nothing after so many tokens of the sequence."""
        return num_tokens < self.silent_until

    def begin_silence(self, num_tokens: int) -> None:
        """Note that its account does not pay for one draft after so many tokens."""
        self.silent_until = num_tokens + self.silence
        self.silence = min(2 * self.silence, LONGEST_SILENCE)


class VerifiedStep(NamedTuple):
    """What is known of the step of which drafts are verified next."""

    rows: int
    plain_s: float  # what it would have taken without drafts
    draft_s: float  # what each of its drafts made it longer by

    def verified(
        self, sequence: SequenceAccount, source: SourceAccount, drafted: int, accepted: int
    ) -> None:
        """Note the outcome of the drafts of one sequence. All of the step waited for them."""
        cost_s, saved_s = self.rows * drafted * self.draft_s, accepted * self.plain_s
        sequence.save(accepted, self.plain_s)
        source.verified(cost_s, saved_s, self.plain_s)
