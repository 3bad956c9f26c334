"""Drafts of a step that cost no sequence in it anything."""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.batch_costs import BatchCosts

OVERDRAWN_STEPS = 0.25
"""Sequences without budget share a step with their own drafts until one lacks this many steps."""


def shared_lengths(
    costs: BatchCosts, rows: int, gains: Sequence[Sequence[float]], rooms: Sequence[float]
) -> list[int]:
    """Return how many drafts to verify of each sequence, as `BatchCosts.best_lengths` does.

    ``rooms`` are the seconds that drafts may make a step longer by, for the sake of each. Where
    some have too little, these alone may have drafts, within the room of the others: what is
    accepted of them gives their room back. One that has none left may have some alone. Without
    that, one of eight sequences that all quote,
    and of which each is behind at times, would keep the others from drafting for good."""
    if not any(costs.best_lengths(rows, gains)):
        return [0] * len(gains)  # nor would any part of them be, of however few sequences
    order = sorted(range(len(rooms)), key=rooms.__getitem__)
    lengths = costs.best_lengths(rows, gains, rooms[order[0]] if order else None)
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
