"""The interface of draft sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from shared.wire import SamplingParams


class Proposal(NamedTuple):
    """A guess of the next tokens."""

    tokens: tuple[int, ...]  # at least one
    source: str
    kinds: tuple[int, ...] = ()
    """The kind of each token; empty if all are of kind 0. Tokens of one source and kind are
    about equally often correct, if all before them are. There are few kinds."""
    likely: tuple[float, ...] = (0.5,)
    """By kind, the assumed acceptance rate, as long as nothing is known about the kind."""

    def kind(self, index: int) -> int:
        """Return the kind of token ``index``."""
        return self.kinds[index] if self.kinds else 0


class DraftSource(ABC):
    """Proposes drafts for one sequence. Every proposed token is verified, so it may be wrong. It
    uses at most `MAX_SOURCE_BYTES` of memory, and little time per call."""

    NAME: ClassVar[str] = ""
    """The source of its proposals."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        """Return up to ``count`` (at least 1) tokens that may follow ``tokens``, the prompt and
        all outputs; None if it has no guess.

        ``tokens`` always extend those of the previous call."""

    def num_possible(self, drafts: Sequence[int]) -> int:
        """Return how many of ``drafts``, of any source, may follow the ``tokens`` of the last
        `propose`: verifying more would be useless."""
        return len(drafts)

    def matcher(self) -> object:
        """Return an object that knows which tokens may follow the ``tokens`` of the last
        `propose`, for a `BatchSource` that supports it (a `GrammarMatcher`). None if unknown."""
        return None


class ExecutorGuesses(DraftSource):
    """Proposes the guesses of its sequence's last result, as long as the text continues
    that way."""

    def __init__(self, name: str) -> None:
        """``name`` is the source's name in metrics."""
        self._name = name
        self._after = 0  # tokens of the text before the guesses
        self._guesses: tuple[int, ...] = ()

    def take(self, after: int, guesses: tuple[int, ...]) -> None:
        """Record that ``guesses`` may follow the first ``after`` tokens."""
        self._after, self._guesses = after, guesses

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        known = len(tokens) - self._after
        if known < 0 or tuple(tokens[self._after :]) != self._guesses[:known]:
            return None
        left = self._guesses[known : known + count]
        return Proposal(left, self._name) if left else None


class DraftRequest(NamedTuple):
    """A request to a `BatchSource` for one sequence."""

    key: object  # identifies the sequence, and is kept with what is known about it
    tokens: Sequence[int]  # the prompt and all outputs; existing ones never change
    num_prompt_tokens: int
    sampling: SamplingParams
    limit: int  # max number of drafts, at least 1
    matcher: object = None  # see `DraftSource.matcher`; it may be moved, and must be restored


class BatchSource(ABC):
    """Proposes drafts for several sequences in one call, which takes about as long as for one."""

    NAME: ClassVar[str]
    max_sequences: int  # max sequences per call

    @property
    def is_usable(self) -> bool:
        """Whether it can propose anything from now on."""
        return True

    def prepare(self) -> None:  # noqa: B027  # not abstract: most sources need nothing
        """Wait until `propose` can start at once. May raise: then the step before this plan has
        failed."""

    @abstractmethod
    def propose(self, asked: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Return guesses of the next tokens for each sequence. Returning none is also allowed."""


def possible_part(proposal: Proposal, sources: Sequence[DraftSource]) -> Proposal:
    """Cut ``proposal`` before the first token that any of ``sources`` knows to be impossible."""
    length = len(proposal.tokens)
    possible = min((source.num_possible(proposal.tokens) for source in sources), default=length)
    if possible == length:
        return proposal
    return proposal._replace(tokens=proposal.tokens[:possible])


MAX_SOURCE_BYTES = 2**21
"""Max memory of a source for one sequence, in addition to the tokens."""
