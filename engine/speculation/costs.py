"""What a decode step costs by its number of tokens, as measured while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

EXACT_TOKENS = 16
"""Steps of up to so many tokens are told apart by every token, larger ones by quarters of a
doubling."""
FASTER, SLOWER = 0.3, 0.05
"""How far the value follows a time below it, and one above: it is about the lowest fifth, since
times are long for many reasons that have nothing to do with the step."""
ASSUMED_TIMES = 4
"""A size counts as much as what other sizes say of it once it was measured so often."""
UNSEEN_STEPS = 64
"""After so many steps, sizes that did not occur meanwhile count as measured half as often."""
ASSUMED_GROWTH = 0.05
"""What each token beyond the largest step that was measured adds, as a part of that: little, so
that longer ones are tried."""
WORTH_IT = 1.03
"""Drafts must make tokens come faster by this factor at least."""


@dataclass(slots=True)
class _Measured:
    """The times of steps of one size."""

    seconds: float
    times: float = 0.0  # how often it was measured; less if that was long ago
    was_seen: bool = False

    def observe(self, elapsed_s: float) -> None:
        difference = elapsed_s - self.seconds
        self.times += 1
        self.seconds += (FASTER if difference < 0 else SLOWER) * difference
        self.was_seen = True

    def forget_unseen(self) -> None:
        if not self.was_seen:
            self.times /= 2
        self.was_seen = False


class StepCosts:
    """Seconds of decode steps without chunks, by the number of tokens that they compute.

    Most sizes are measured seldom, and any time may be much too long by chance. So what is known of
    a size is drawn towards the lower convex hull of all: a step of more tokens takes longer, and
    each further token as long as those before or longer. A time above that is tried again."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._known: list[int] = []  # keys of it, sorted
        self._predicted: dict[int, float] = {}  # of those; empty after a measurement
        self._steps = 0

    def observe(self, tokens: int, elapsed_s: float) -> None:
        if elapsed_s <= 0:
            return
        size = _size(tokens)
        if size not in self._measured:
            self._measured[size] = _Measured(elapsed_s)
            self._known = sorted(self._measured)
        self._measured[size].observe(elapsed_s)
        self._predicted.clear()
        self._steps += 1
        if self._steps % UNSEEN_STEPS == 0:
            for measured in self._measured.values():
                measured.forget_unseen()

    def predict_s(self, tokens: int) -> float:
        """Return the seconds of a step of ``tokens``; 0 if nothing is known."""
        known = self._known
        if not known:
            return 0.0
        if not self._predicted:
            self._predict()
        place = bisect_left(known, tokens)
        if (place < len(known) and known[place] == tokens) or place == 0:
            return self._predicted[known[place]]
        if place == len(known):
            return _grown(self._predicted[known[-1]], tokens - known[-1])
        return _between(tokens, known[place - 1], known[place], self._predicted)

    def _predict(self) -> None:
        """Predict the time of each known size."""
        own = {size: self._measured[size].seconds for size in self._known}
        if len(own) > 1:
            last, before = self._known[-1], self._known[-2]
            own[last] = min(own[last], _grown(own[before], last - before))
        hull: list[int] = []
        for size in reversed(self._known):  # from above: nothing takes longer than what is larger
            if hull and own[size] > own[hull[-1]]:
                own[size] = own[hull[-1]]
            while len(hull) > 1 and _between(hull[-1], size, hull[-2], own) <= own[hull[-1]]:
                hull.pop()
            hull.append(size)
        for above, below in pairwise(hull):
            for size in filter(range(below, above).__contains__, self._known):
                own[size] = _between(size, below, above, own)
        for size, measured in self._measured.items():
            share = measured.times / (measured.times + ASSUMED_TIMES)
            self._predicted[size] = share * measured.seconds + (1 - share) * own[size]

    def seconds(self) -> dict[int, float]:
        """Return what is known, by tokens."""
        return {size: self._measured[size].seconds for size in self._known}

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


def _grown(seconds: float, tokens: int) -> float:
    """Return what is assumed of a step with ``tokens`` more than one that takes ``seconds``."""
    return seconds * (1 + ASSUMED_GROWTH * tokens)


def _between(tokens: int, below: int, above: int, seconds: Mapping[int, float]) -> float:
    """Return the seconds of ``tokens`` on the line from size ``below`` to size ``above``."""
    share = (tokens - below) / (above - below)
    return (1 - share) * seconds[below] + share * seconds[above]
