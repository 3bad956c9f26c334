"""The rows of a batch that attend together.

One attention call over a run of neighbouring rows costs (rows x longest row), plus a fixed cost.
This finds the cheapest split into runs, so that short rows do not pay for long ones, and rows of
equal length share a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Neighbouring rows."""

    first: int
    last: int  # the last row, inclusive
    length: int  # tokens of the longest row


def split_runs(rows: Sequence[int], lengths: Sequence[int], call_cost_tokens: float) -> list[Run]:
    """Split the ascending ``rows`` with their ``lengths`` (tokens) into runs.

    ``call_cost_tokens`` is the fixed cost of a call, as the positions of one row that attention
    reads in the same time. Dynamic programming over the start of the last run.
    """
    count = len(rows)
    best = [0.0] + [float("inf")] * count
    start_of_last = [0] * (count + 1)
    for end in range(1, count + 1):
        longest = 0
        for start in range(end - 1, -1, -1):
            longest = max(longest, lengths[start])
            span = rows[end - 1] - rows[start] + 1
            cost = best[start] + call_cost_tokens + span * longest
            if cost < best[end]:
                best[end] = cost
                start_of_last[end] = start
    result: list[Run] = []
    end = count
    while end:
        start = start_of_last[end]
        result.append(Run(rows[start], rows[end - 1], max(lengths[start:end])))
        end = start
    return result[::-1]
