"""How long something takes on this machine, for what is chosen by measuring at start."""

from __future__ import annotations

import time
from collections.abc import Callable

ROUNDS = 3


def shortest_s(work: Callable[[], object], long_s: float) -> float:
    """Seconds of the shortest of some rounds of ``work``: whatever else the machine does only
    adds. What takes longer than ``long_s`` is done once."""
    shortest = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - started)
        if shortest > long_s:
            break
    return shortest
