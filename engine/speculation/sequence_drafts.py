"""The state of one sequence for its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.speculation.acceptance import AcceptanceRate
from engine.speculation.accounts import SequenceAccount, SourceAccount
from engine.speculation.source import DraftRequest, DraftSource, ExecutorGuesses, Proposal
from shared.wire import Submit

ASSUMED_RATE = 0.6
"""The acceptance rate that a sequence starts with."""


@dataclass(eq=False, slots=True)
class SequenceDrafts:
    """The sources of one sequence, and how often they are correct."""

    request: Submit
    sources: list[DraftSource]
    rate: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(ASSUMED_RATE))
    rates: dict[tuple[str, int], AcceptanceRate] = field(default_factory=dict)
    next_probe: int = 0
    """Number of tokens, prompt included, from which it drafts again after it stopped."""
    predicted: tuple[int, ...] = ()
    """Next tokens according to the request's `prediction`."""
    accepted: int = 0  # drafts that the prediction also contains, whatever their source
    rejected: int = 0
    guesses: ExecutorGuesses | None = None
    """The one of ``sources`` that proposes the executor's guesses, if there is one."""
    account: SequenceAccount = field(default_factory=SequenceAccount)
    accounts: dict[str, SourceAccount] = field(default_factory=dict)
    """Accounts of the sources, by name."""
    has_waited: bool = False
    """Whether it was left out of the last plan, for its drafts."""
    guessed: dict[str, tuple[int, Proposal]] = field(default_factory=dict)
    """By source, a guess that was not verified, and the number of tokens before it."""
    resumed: set[str] = field(default_factory=set)
    """Sources whose guesses were right since drafts were rarely accepted."""

    def account_of(self, source: str) -> SourceAccount:
        return self.accounts.setdefault(source, SourceAccount())


class DraftRow(NamedTuple):
    """A sequence that decodes in the next step."""

    drafts: SequenceDrafts
    tokens: Sequence[int]  # prompt and outputs
    limit: int  # max number of drafts

    def request(self, count: int) -> DraftRequest:
        """Return a request for ``count`` drafts from a `BatchSource`."""
        request = self.drafts.request
        matchers = (source.matcher() for source in self.drafts.sources)
        return DraftRequest(
            self.drafts,
            self.tokens,
            len(request.token_ids),
            request.sampling,
            count,
            next((matcher for matcher in matchers if matcher is not None), None),
        )
