"""What a decode step costs by its number of tokens, as measured while serving."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

EXACT_TOKENS = 16
"""Steps of up to so many tokens are told apart by every token, larger ones by quarters of a
doubling."""
FASTER, SLOWER = 0.3, 0.05
"""How far the value follows a time below it, and one above: it is about the lowest fifth, since
times are long for many reasons that have nothing to do with the step."""
ASSUMED_TIMES = 4
"""A size counts as much as what other sizes say of it once it was measured so often."""
LATELY = 0.1
"""So often at least has a size been measured that was measured once, three times `UNSEEN_STEPS`
ago."""
UNSEEN_STEPS = 64
"""After so many steps, sizes that did not occur meanwhile count as measured half as often."""
ASSUMED_GROWTH = 0.1
"""What each token beyond the largest step that was measured adds, as a part of that. With AVX2 a
token of the first steps takes 0.08; longer ones are tried all the same."""
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
        self._at_least: list[float] = []  # what it or a smaller one of those took, as measured
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

    def at_least_s(self, tokens: int) -> float:
        """Return what steps of ``tokens`` or less took lately, as they were measured, however
        seldom: for those who must not be wrong. 0 if nothing is known."""
        if not self._predicted and self._known:
            self._predict()
        place = bisect_right(self._known, tokens)
        return self._at_least[place - 1] if place else 0.0

    @property
    def largest(self) -> int:
        """The most tokens of a step that was measured; 0 without any."""
        return self._known[-1] if self._known else 0

    def knows(self, tokens: int) -> bool:
        """Return whether steps of so many tokens were measured often enough to trust that."""
        measured = self._measured.get(_size(tokens))
        return measured is not None and measured.times >= ASSUMED_TIMES

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
        lately = (self._measured[size] for size in self._known)
        seconds = (each.seconds if each.times >= LATELY else 0.0 for each in lately)
        self._at_least = list(accumulate(seconds, max))

    def seconds(self) -> dict[int, float]:
        """Return what is known, by tokens."""
        return {size: self._measured[size].seconds for size in self._known}


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
