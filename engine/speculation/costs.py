"""The time of a decode step by its number of tokens, measured while serving."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

EXACT_TOKENS = 16
"""Steps of up to this many tokens have a size of their own; larger ones are grouped by quarter
octaves."""
FASTER, SLOWER = 0.3, 0.05
"""How far the value follows a lower time, and a higher one. The result is about the lowest
fifth, because many causes that have nothing to do with the step make times long."""
EVENLY = 0.2
"""How far it follows both if they were cut to what is plausible."""
ASSUMED_TIMES = 4
"""Number of measurements after which a size counts as much as the prediction from other sizes."""
LATELY = 0.1
"""Number of measurements left of a size that was measured once, three times `UNSEEN_STEPS` ago."""
UNSEEN_STEPS = 64
"""After this many steps without a size, its number of measurements is halved."""
ASSUMED_GROWTH = 0.1
"""Assumed growth for each token beyond the largest measured step, as a fraction of its time.
With AVX2 the true value is 0.08 for the first tokens; larger steps are tried all the same."""
WORTH_IT = 1.03
"""Min speedup that makes drafts worth while."""


@dataclass(slots=True)
class _Measured:
    """The times of steps of one size."""

    seconds: float
    times: float = 0.0  # number of measurements, reduced if they are old
    was_seen: bool = False

    def observe(self, elapsed_s: float, faster: float, slower: float) -> None:
        """``faster`` and ``slower``: how far to follow a lower time, and a higher one."""
        if self.times == 1:
            faster = 1.0  # the first step of a size prepares others
        difference = elapsed_s - self.seconds
        self.seconds += (faster if difference < 0 else slower) * difference
        self.times += 1
        self.was_seen = True

    def forget_unseen(self) -> None:
        if not self.was_seen:
            self.times /= 2
        self.was_seen = False


class StepCosts:
    """Seconds of decode steps without chunks, by number of tokens.

    Most sizes are measured rarely, and any time may be much too long by chance. Values are
    therefore drawn towards the lower convex hull of all sizes: a step with more tokens takes
    longer, and each further token takes at least as long as the ones before. A time above that
    is tried again."""

    def __init__(self, *, evenly: bool = False) -> None:
        """``evenly``: whether times that are too long were cut already."""
        self._follows = (EVENLY, EVENLY) if evenly else (FASTER, SLOWER)
        self._measured: dict[int, _Measured] = {}
        self._known: list[int] = []  # its keys, sorted
        self._predicted: dict[int, float] = {}  # predictions for these; empty after a measurement
        self._at_least: list[float] = []  # the lowest measured time of it or a larger one
        self._steps = 0

    def observe(self, tokens: int, elapsed_s: float) -> None:
        if elapsed_s <= 0:
            return
        size = _size(tokens)
        if size not in self._measured:
            self._measured[size] = _Measured(elapsed_s)
            self._known = sorted(self._measured)
        self._measured[size].observe(elapsed_s, *self._follows)
        self._predicted.clear()
        self._steps += 1
        if self._steps % UNSEEN_STEPS == 0:
            for measured in self._measured.values():
                measured.forget_unseen()

    def predict_s(self, tokens: int) -> float:
        """Return the predicted seconds of a step of ``tokens``; 0 if nothing is known."""
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
        """Return the recent time of steps of at most ``tokens``, as measured, even if only twice,
        unless larger steps took less: for callers that must not underestimate. 0 if nothing is
        known."""
        if not self._predicted and self._known:
            self._predict()
        place = bisect_right(self._known, tokens)
        return self._at_least[place - 1] if place else 0.0

    @property
    def largest(self) -> int:
        """The largest number of tokens of a measured step; 0 without any."""
        return self._known[-1] if self._known else 0

    def knows(self, tokens: int) -> bool:
        """Return whether steps of ``tokens`` were measured often enough to trust the time."""
        measured = self._measured.get(_size(tokens))
        return measured is not None and measured.times >= ASSUMED_TIMES

    def _predict(self) -> None:
        """Predict the time of each known size."""
        own = {size: self._measured[size].seconds for size in self._known}
        if len(own) > 1:
            last, before = self._known[-1], self._known[-2]
            own[last] = min(own[last], _grown(own[before], last - before))
        hull: list[int] = []
        for size in reversed(self._known):  # from above: no size takes longer than a larger one
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
        lately = (self._lately_s(size) or math.inf for size in reversed(self._known))
        self._at_least = [s if s < math.inf else 0.0 for s in accumulate(lately, min)][::-1]

    def _lately_s(self, size: int) -> float:
        """Return the time of steps of ``size`` as measured; 0 if that was long ago. A single
        time, which is much too long at times, counts half, and the prediction the other half."""
        measured = self._measured[size]
        if measured.times < LATELY:
            return 0.0
        if measured.times > 1:
            return measured.seconds
        return (measured.seconds + self._predicted[size]) / 2

    def seconds(self) -> dict[int, float]:
        """Return the known seconds, by number of tokens."""
        return {size: self._measured[size].seconds for size in self._known}


def _size(tokens: int) -> int:
    """Return the size of a step of ``tokens``."""
    if tokens <= EXACT_TOKENS:
        return tokens
    return round(2 ** (round(4 * math.log2(tokens)) / 4))


def _grown(seconds: float, tokens: int) -> float:
    """Return the assumed time of a step with ``tokens`` more than one that takes ``seconds``."""
    return seconds * (1 + ASSUMED_GROWTH * tokens)


def _between(tokens: int, below: int, above: int, seconds: Mapping[int, float]) -> float:
    """Interpolate the seconds of ``tokens`` between sizes ``below`` and ``above``."""
    share = (tokens - below) / (above - below)
    return (1 - share) * seconds[below] + share * seconds[above]
