"""Drafts that the executor guesses itself, at the end of the decode before."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.source import DraftSource, Proposal


class ExecutorGuesses(DraftSource):
    """Proposes what came with the last result of its sequence, as long as the text goes on so."""

    def __init__(self, name: str) -> None:
        """``name`` is that of the source in metrics."""
        self._name = name
        self._after = 0  # tokens of the text before the guesses
        self._guesses: tuple[int, ...] = ()

    def take(self, after: int, guesses: tuple[int, ...]) -> None:
        """Note that ``guesses`` may follow the first ``after`` tokens."""
        self._after, self._guesses = after, guesses

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        known = len(tokens) - self._after
        if known < 0 or tuple(tokens[self._after :]) != self._guesses[:known]:
            return None
        left = self._guesses[known : known + count]
        return Proposal(left, self._name) if left else None
