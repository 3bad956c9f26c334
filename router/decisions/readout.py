"""From the log-probabilities of labels to answers: pure functions.

Confidence and score are those that TypeSafe's API documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.errors import InternalError


def calibrated(logprobs: Sequence[float], temperature: float) -> tuple[list[float], float]:
    """Return the probabilities of labels at ``temperature``, which add up to 1, and their mass: the
    probability that the model gives to all of them.

    Raises `InternalError` if the model gave no numbers, or no probability to any label."""
    best, mass = max(logprobs), sum(map(math.exp, logprobs))
    if not math.isfinite(best) or not math.isfinite(mass):
        raise InternalError
    weights = [math.exp((each - best) / temperature) for each in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights], min(1.0, mass)


def mean(distributions: Sequence[Sequence[float]]) -> list[float]:
    """Return the average of distributions over the same options."""
    return [sum(column) / len(distributions) for column in zip(*distributions, strict=True)]


def choice_confidence(probabilities: Sequence[float]) -> float:
    """Return how far the best option is above chance: 0 if all are alike, 1 if it is certain."""
    count = len(probabilities)
    if count == 1:
        return 1.0
    return max(0.0, (max(probabilities) - 1 / count) / (1 - 1 / count))


def expected_level(probabilities: Sequence[float]) -> float:
    return sum(level * p for level, p in enumerate(probabilities))


def score_confidence(probabilities: Sequence[float]) -> float:
    """Return 1 minus the mean distance from the most likely level, relative to the mean distance of
    evenly likely levels from the middle of the scale; at least 0."""
    count = len(probabilities)
    if count == 1:
        return 1.0
    mode = max(range(count), key=probabilities.__getitem__)
    spread = sum(p * abs(level - mode) for level, p in enumerate(probabilities))
    chance = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - spread / chance)
