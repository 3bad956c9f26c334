"""Positions of models whose pictures have three axes (see `engine.batch.axes`)."""

from __future__ import annotations

from engine.scheduler.sequence import Sequence


def position_shift(seq: Sequence, end: int) -> int:
    """Return what is added to positions of text after all pictures that end before ``end``: a
    picture takes as many positions as its longest side has embeddings."""
    return sum(
        max(one.grid) - len(one.places)
        for one in seq.pictures
        if one.grid is not None and one.end <= end
    )


def axes_of(seq: Sequence, start: int, end: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions from ``start`` to ``end`` (exclusive) in each axis; empty if there is no
    part of a picture between them, or none has axes."""
    shown = [one for one in seq.pictures if one.places[0] < end and start <= one.places[-1]]
    if not any(one.grid for one in shown):
        return ()
    places = list(range(start, end))
    found: list[list[int]] = [[], [], []]
    for at in places:
        inside = next((one for one in shown if one.places[0] <= at <= one.places[-1]), None)
        if inside is None or inside.grid is None:
            shifted = at + position_shift(seq, at)
            for axis in found:
                axis.append(shifted)
            continue
        _, rows, columns = inside.grid
        first, number = inside.places[0], at - inside.places[0]
        base = first + position_shift(seq, first)
        found[0].append(base + number // (rows * columns))
        found[1].append(base + number // columns % rows)
        found[2].append(base + number % columns)
    return tuple(map(tuple, found))
