"""The interface of what proposes drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from shared.wire import SamplingParams


class Proposal(NamedTuple):
    """A guess of the tokens that come next."""

    tokens: tuple[int, ...]  # at least one
    source: str
    kinds: tuple[int, ...] = ()
    """For each token its kind; empty if all are of kind 0. Tokens of one source and kind are about
    equally often right, if all before them are; kinds are few."""
    likely: tuple[float, ...] = (0.5,)
    """By kind, how likely a token is accepted, as long as nothing is known of its kind."""

    def kind(self, index: int) -> int:
        """Return the kind of a token."""
        return self.kinds[index] if self.kinds else 0


class DraftSource(ABC):
    """Proposes drafts for one sequence. Every token that it proposes is verified, so it may be
    wrong. It takes no more memory than `MAX_SOURCE_BYTES`, and a call little time."""

    NAME: ClassVar[str] = ""
    """The source of its proposals, if it need not be asked while that is silent."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        """Return up to ``count`` (at least 1) tokens that may follow ``tokens``, the prompt and all
        outputs; None if it has no guess.

        In each call ``tokens`` are those of the call before and more."""

    def num_possible(self, drafts: Sequence[int]) -> int:
        """Return how many of ``drafts``, of any source, may follow the ``tokens`` of the last
        `propose`: those behind would be verified for nothing."""
        return len(drafts)

    def matcher(self) -> object:
        """Return what says which tokens may follow the ``tokens`` of the last `propose`, for a
        `BatchSource` that can ask it (a `GrammarMatcher`). None if it is not known."""
        return None


class DraftRequest(NamedTuple):
    """What a `BatchSource` is asked for one sequence."""

    key: object  # names the sequence, and is kept with what is known of it
    tokens: Sequence[int]  # the prompt and all outputs, of which the first ones never change
    num_prompt_tokens: int
    sampling: SamplingParams
    limit: int  # the most drafts, at least 1
    matcher: object = None  # see `DraftSource.matcher`; it may be moved, and has to come back


class BatchSource(ABC):
    """Proposes drafts for several sequences in one call, which takes about as long as for one."""

    NAME: ClassVar[str]
    max_sequences: int  # the most of one call

    @abstractmethod
    def propose(self, asked: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Return tokens that may follow, for each sequence. None are a guess as well."""


def possible_part(proposal: Proposal, sources: Sequence[DraftSource]) -> Proposal:
    """Return ``proposal`` up to what none of ``sources`` knows to be impossible."""
    length = len(proposal.tokens)
    possible = min((source.num_possible(proposal.tokens) for source in sources), default=length)
    if possible == length:
        return proposal
    return proposal._replace(tokens=proposal.tokens[:possible])


MAX_SOURCE_BYTES = 2**21
"""What one source may take for a sequence, beside the tokens."""
