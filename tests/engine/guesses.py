"""A source of drafts for tests, which knows the right text."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from engine.speculation.source import DraftSource, Proposal
from engine.speculation.speculator import SpeculationOptions, Speculator
from shared import wire


class Guesses(DraftSource):
    """Proposes the next tokens of ``text``, each of them wrong with a probability of ``wrong``."""

    def __init__(self, text: Sequence[int], wrong: float, seed: int, vocabulary: int) -> None:
        self._text = text
        self._wrong = wrong
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        # It often has no guess, or a short one.
        right = self._text[len(tokens) : len(tokens) + self._random.randrange(count + 2)]
        guess = tuple(
            self._another(token) if self._random.random() < self._wrong else token
            for token in right[:count]
        )
        return Proposal(guess, "guesses") if guess else None

    def _another(self, token: int) -> int:
        return (token + self._random.randrange(1, self._vocabulary)) % self._vocabulary


def guessing(
    text_of: Callable[[wire.Submit], Sequence[int]],
    wrong: float | Mapping[str, float] = 0.3,
    tokens: int = 5,
    vocabulary: int = 24,
    adapts: bool = False,
    executor: str = "",
) -> Speculator:
    """Return a speculator that knows prompt and outputs of each request. ``wrong`` may depend on
    the request. With ``executor``, the name of its guesses, those of the executor count alone."""

    def make(request: wire.Submit, grammar: object) -> DraftSource:
        part = wrong if isinstance(wrong, float) else wrong[request.request_id]
        return Guesses(text_of(request), part, request.sampling.seed, vocabulary)

    options = SpeculationOptions(tokens=tokens, largest_batch=16, adapts=adapts)
    return Speculator(options, [] if executor else [make], executor)
