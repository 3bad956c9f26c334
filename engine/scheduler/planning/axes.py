"""Positions of models whose pictures have three axes (see `engine.batch.axes`)."""

from __future__ import annotations

from engine.scheduler.sequences.sequence import Sequence


def position_shift(seq: Sequence, end: int) -> int:
    """Return the shift of text positions after all pictures that end before ``end``. A picture
    takes as many positions as its longest side has embeddings."""
    return sum(
        max(one.grid) - len(one.places)
        for one in seq.pictures
        if one.grid is not None and one.end <= end
    )


def axes_of(seq: Sequence, start: int, end: int) -> tuple[tuple[int, ...], ...]:
    """Return the positions from ``start`` to ``end`` (exclusive) in each axis; empty if no
    picture is there, or its model uses no axes."""
    found: list[list[int]] = [[], [], []]
    at = start
    for one in seq.pictures:
        if one.grid is None or one.start >= end or one.end <= start:
            continue
        _, rows, columns = one.grid
        shift = position_shift(seq, one.start)
        text, base = range(at + shift, one.start + shift), one.start + shift
        numbers = range(max(start, one.start) - one.start, min(end, one.end) - one.start)
        found[0] += [*text, *(base + n // (rows * columns) for n in numbers)]
        found[1] += [*text, *(base + n // columns % rows for n in numbers)]
        found[2] += [*text, *(base + n % columns for n in numbers)]
        at = one.end
    if not found[0]:
        return ()
    shift = position_shift(seq, at)
    return tuple((*axis, *range(at + shift, end + shift)) for axis in found)
