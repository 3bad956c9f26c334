"""Measures of several sides in turn, so that other programs slow all of them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence


def in_turn(
    measures: Sequence[Callable[[int], float]], runs: int, warm_up: int = 0
) -> list[list[float]]:
    """Call each of ``measures`` with the number of each run; every second run goes backwards.

    Return the results of each, without those of the first ``warm_up`` runs."""
    found: list[list[float]] = [[] for _ in measures]
    for run in range(warm_up + runs):
        order = range(len(measures))
        for which in order if run % 2 == 0 else reversed(order):
            found[which].append(measures[which](run))
    return [each[warm_up:] for each in found]


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of pairs."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))
