"""What a decode step costs by its number of tokens, as measured while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

EXACT_TOKENS = 16
"""Steps of up to so many tokens are told apart by every token, larger ones by quarters of a
doubling."""
FASTER, SLOWER = 0.3, 0.05
"""How far the value follows a time below it, and one above: it is about the lowest fifth, since
times are long for many reasons that have nothing to do with the step."""
UNSEEN_STEPS = 64
"""After so many steps the times of sizes that did not occur meanwhile..."""
UNSEEN_PART = 0.95
"""...count as so much shorter, down to those of smaller ones: one that was too long by chance would
never be measured again."""
ASSUMED_GROWTH = 0.05
"""What each token beyond the largest step that was measured adds, as a part of that: little, so
that longer ones are tried."""
WORTH_IT = 1.03
"""Drafts must make tokens come faster by this factor at least."""


class StepCosts:
    """Seconds of decode steps without chunks, by the number of tokens that they compute."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._known: list[int] = []  # keys of it, sorted
        self._steps = 0
        self._seen: set[int] = set()  # sizes of the last steps, up to `UNSEEN_STEPS`

    def observe(self, tokens: int, elapsed_s: float) -> None:
        size = _size(tokens)
        if elapsed_s <= 0:
            return
        self._seen.add(size)
        self._steps += 1
        if self._steps % UNSEEN_STEPS == 0:
            self._shorten_unseen()
        if size not in self._seconds:
            self._seconds[size] = elapsed_s
            self._known = sorted(self._seconds)
            return
        difference = elapsed_s - self._seconds[size]
        self._seconds[size] += (FASTER if difference < 0 else SLOWER) * difference

    def _shorten_unseen(self) -> None:
        for below, size in pairwise(self._known):
            if size not in self._seen:
                shorter = max(UNSEEN_PART * self._seconds[size], self._seconds[below])
                self._seconds[size] = min(self._seconds[size], shorter)
        self._seen.clear()

    def predict_s(self, tokens: int) -> float:
        """Return the seconds of a step of ``tokens``; 0 if nothing is known."""
        known = self._known
        if not known:
            return 0.0
        place = bisect_left(known, tokens)
        if (place < len(known) and known[place] == tokens) or place == 0:
            return self._seconds[known[place]]
        below = known[place - 1]
        if place == len(known):
            return self._seconds[below] * (1 + ASSUMED_GROWTH * (tokens - below))
        above = known[place]
        share = (tokens - below) / (above - below)
        return (1 - share) * self._seconds[below] + share * self._seconds[above]

    def seconds(self) -> dict[int, float]:
        """Return what is known, by tokens."""
        return {size: self._seconds[size] for size in self._known}

    def best_lengths(self, rows: int, gains: Sequence[Sequence[float]]) -> list[int]:
        """Return how many drafts to verify of each of the sequences that have some, in a step of
        ``rows`` sequences: those that give the most tokens a second.

        ``gains`` are for each sequence the chances that its drafts are accepted, with all before
        them: they fall from one draft to the next."""
        order = sorted(
            ((gain, row) for row, chances in enumerate(gains) for gain in chances), reverse=True
        )
        lengths, best = [0] * len(gains), 0
        expected = float(rows)
        best_rate = WORTH_IT * expected / (self.predict_s(rows) or 1.0)
        for number, (gain, _) in enumerate(order, 1):
            expected += gain
            rate = expected / (self.predict_s(rows + number) or 1.0)
            if rate > best_rate:
                best, best_rate = number, rate
        for _, row in order[:best]:
            lengths[row] += 1
        return lengths


def _size(tokens: int) -> int:
    """Return the number of tokens as which a step of ``tokens`` counts."""
    if tokens <= EXACT_TOKENS:
        return tokens
    return round(2 ** (round(4 * math.log2(tokens)) / 4))
