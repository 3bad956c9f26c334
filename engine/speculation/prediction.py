"""Drafts from a text that the client expects the answer to repeat in large parts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.speculation.ngram import LIKELY, LONGEST_KIND, MAX_AT_ONCE, NgramIndex, kinds_after
from engine.speculation.source import DraftSource, Proposal
from shared.wire import Submit

NEAR_TOKENS = 32
"""Distance from the expected place within which the text is searched first."""
SHORTEST, LONGEST = 2, 4
"""N-gram lengths for a search anywhere else, and the min length of a match."""
BEGINS_ALIKE = 0.6
"""Assumed acceptance of the beginning of the text as the beginning of the answer."""


class PredictionSource(DraftSource):
    """Proposes the predicted text as long as the answer repeats it. After a deviation, the place is
    found again from the last tokens: near the place of the deviation, or else anywhere."""

    NAME = "prediction"

    def __init__(self, prediction: Sequence[int], num_prompt_tokens: int) -> None:
        self._text = array("i", prediction)
        self._index = NgramIndex(SHORTEST, LONGEST, len(prediction))
        self._followed = num_prompt_tokens
        self._next = 0
        """Place in the text that the next output is expected to repeat."""
        self._matched = 0
        """Number of tokens before it that were repeated. Initially 0, when the place is a guess."""
        self._lost = False

    @classmethod
    def of(cls, request: Submit, grammar: object) -> PredictionSource | None:
        """Return the source of ``request``, None if it has no prediction."""
        if not request.prediction:
            return None
        return cls(request.prediction, len(request.token_ids))

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        known = len(self._index.tokens)
        self._index.extend(self._text[known : known + MAX_AT_ONCE])
        self._follow(tokens)
        drafts = () if self._lost else tuple(self._text[self._next : self._next + count])
        if not drafts:
            return None
        kinds = kinds_after(self._matched, len(drafts))
        return Proposal(drafts, self.NAME, kinds, (BEGINS_ALIKE, *LIKELY[1:]))

    def _follow(self, tokens: Sequence[int]) -> None:
        """Continue to the end of ``tokens``."""
        new = tokens[self._followed :]
        self._followed = len(tokens)
        end = self._next + len(new)
        if not self._lost and self._text[self._next : end].tolist() == list(new):
            self._next, self._matched = end, min(self._matched + len(new), LONGEST_KIND)
        elif new:
            self._find(tokens, end)

    def _find(self, tokens: Sequence[int], expected: int) -> None:
        """Find the place in the text after the last of ``tokens``: the longest match near the
        ``expected`` place (the nearest of several), or else the last match in the whole text."""
        end = min(len(self._index.tokens), expected + NEAR_TOKENS)
        near = range(max(0, expected - NEAR_TOKENS), end)
        best = max(
            ((self._index.match(place, tokens), -abs(place - expected), place) for place in near),
            default=(0, 0, 0),
        )
        length, _, place = best
        if length < SHORTEST and (found := self._index.find(tokens)) is not None:
            place, length = found.after, found.length
        self._lost = length < SHORTEST
        self._next, self._matched = (expected, 0) if self._lost else (place, length)


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
