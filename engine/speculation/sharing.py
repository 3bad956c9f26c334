"""Drafts of a step that make no sequence in it lose time."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.batch_costs import BatchCosts

OVERDRAWN_STEPS = 0.25
"""Sequences without budget draft together until one of them lacks this many steps."""


def shared_lengths(
    costs: BatchCosts,
    rows: int,
    gains: Sequence[Sequence[float]],
    rooms: Sequence[float],
    *,
    strict: bool = False,
) -> list[int]:
    """Return how many drafts to verify for each sequence, like `BatchCosts.best_lengths`.

    ``rooms`` are the seconds by which drafts may make a step longer, for each sequence. If some
    have too little, only these may have drafts, within the room of the others: accepted drafts
    restore their room. A sequence with no room left may still draft alone. Otherwise one of
    eight sequences that all quote, each of which is behind at times, would keep the others from
    drafting for good. ``strict``: it may not."""
    if not any(costs.best_lengths(rows, gains)):
        return [0] * len(gains)  # nor any part of them, of however few sequences
    order = sorted(range(len(rooms)), key=rooms.__getitem__)
    lengths = costs.best_lengths(rows, gains, rooms[order[0]] if order else None)
    if strict:
        return lengths
    least_s = -OVERDRAWN_STEPS * costs.plain_s(rows)
    for number in range(1, len(order) + 1):
        if any(lengths) or (number > 1 and rooms[order[0]] < least_s):
            break
        others_s = rooms[order[number]] if number < len(order) else costs.plain_s(rows)
        behind = set(order[:number])
        own = [chances if row in behind else () for row, chances in enumerate(gains)]
        if others_s > 0 and any(own):
            lengths = costs.best_lengths(rows, own, others_s)
    return lengths
