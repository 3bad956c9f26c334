"""Rows of a slab that attend in one call, and what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from engine.batch.ragged import Row
from engine.cache.grouping import split_runs
from engine.cache.slabs import Slab

Mask: TypeAlias = mx.array | str | None

ROUNDED_TOKENS = 256
"""Lengths are rounded to this before rows are split into groups, so that most steps of the same
sequences find the split of the step before."""


class Reach(NamedTuple):
    """The keys and values that a group attends to within a window."""

    where: tuple[slice, slice, slice]  # rows, kv heads and positions of the slab's arrays
    mask: Mask  # of the queries, (rows, 1, width, positions), "causal" or None


class RowGroup:
    """Neighbouring rows of one slab. Rows between the members attend too; that is not read."""

    def __init__(self, slab: Slab, rows: Sequence[Row], members: range, width: int) -> None:
        """``members`` are the indices in the batch of ``rows``, and ``width`` is its width."""
        self.slab = slab
        self.first, self.last = rows[0].slot.row, rows[-1].slot.row
        self.members = members
        self._width = width
        self._length = max(row.end for row in rows)
        self._starts = {row.slot.row: row.start for row in rows}

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def batch_rows(self) -> list[int]:
        """Return a row of the batch for each row of the slab: a member's own, or any."""
        own = dict(zip(self._starts, self.members, strict=True))
        return [own.get(row, self.members[0]) for row in range(self.first, self.last + 1)]

    def places(self) -> list[int]:
        """Return the place of each member among the rows of the slab."""
        return [row - self.first for row in self._starts]

    def reach(self, window: int | None) -> Reach:
        """Return what the rows attend to: with a ``window``, from the first position on that any
        of them sees."""
        width, length, low = self._width, self._length, min(self._starts.values())
        is_even = len(self._starts) == self.size and low == max(self._starts.values())
        mask: Mask = None
        if is_even and width > 1:
            mask = "causal"
            length = low + width  # where the mask has its last query
        first = 0 if window is None else max(0, low + 1 - window)
        is_cut = window is not None and length > window and not (is_even and width == 1)
        if not is_even or is_cut or length > self.slab.capacity:
            length = min(length, self.slab.capacity)
            mask = self._mask(first, length, window if is_cut else None)
        return Reach((slice(self.first, self.last + 1), slice(None), slice(first, length)), mask)

    def _mask(self, first: int, length: int, window: int | None) -> mx.array:
        """Return the mask over positions ``first`` to ``length``. It has a row if all are alike."""
        low = min(self._starts.values())
        starts = [self._starts.get(row, low) for row in range(self.first, self.last + 1)]
        if len(set(starts)) == 1:
            starts = starts[:1]
        queries = mx.array(starts)[:, None, None, None]
        if self._width > 1:
            # Padding sees something too: a mean of nothing is NaN, which would be stored, and
            # what is masked must be finite.
            queries = mx.minimum(queries + mx.arange(self._width)[:, None], length - 1)
        positions = mx.arange(first, length)
        mask = positions <= queries
        return mask if window is None else mask & (positions > queries - window)


def row_groups(
    slab: Slab, first: int, rows: Sequence[Row], width: int, call_cost_tokens: float
) -> list[RowGroup]:
    """Return the groups of ``rows``, the first of which has index ``first`` in the batch."""
    numbers = tuple(row.slot.row for row in rows)
    shortest = min(row.end for row in rows)
    longer = tuple(row.end - shortest for row in rows)
    cuts = _cuts(numbers, longer, -(-shortest // ROUNDED_TOKENS), call_cost_tokens)
    return [
        RowGroup(slab, rows[a:b], range(first + a, first + b), width) for a, b in pairwise(cuts)
    ]


@lru_cache(maxsize=256)
def _cuts(
    numbers: tuple[int, ...], longer: tuple[int, ...], shortest: int, call_cost_tokens: float
) -> tuple[int, ...]:
    """Return the index of each group's first row, and the number of rows.

    ``longer`` is how much longer than the shortest row each one is, in tokens, and ``shortest``
    the length of that one, in units of `ROUNDED_TOKENS`."""
    lengths = [shortest * ROUNDED_TOKENS + each for each in longer]
    runs = split_runs(numbers, lengths, call_cost_tokens)
    return (*(numbers.index(run.first) for run in runs), len(numbers))
