"""Drafts guessed by the executor itself, at the end of the previous decode."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.source import DraftSource, Proposal


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
