"""Measurements at startup, for machine-dependent choices."""

from __future__ import annotations

import time
from collections.abc import Callable

ROUNDS = 3


def shortest_s(work: Callable[[], object], long_s: float) -> float:
    """Return the seconds of the fastest of several rounds of ``work``.

    Other load on the machine only adds time. Work longer than ``long_s`` runs once."""
    shortest = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - started)
        if shortest > long_s:
            break
    return shortest
