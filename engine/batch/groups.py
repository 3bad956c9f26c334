"""Rows of a slab that attend in one call, and what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TypeAlias

import mlx.core as mx

from engine.batch.ragged import Row
from engine.cache.grouping import split_runs
from engine.cache.slabs import Slab

Mask: TypeAlias = mx.array | str | None

ROUNDED_TOKENS = 256
"""Lengths are rounded to this before rows are split into groups, so that most steps of the same
sequences reuse the split of the previous step."""


class Reach:
    """The keys and values that a group attends to within a window."""

    def __init__(self, group: RowGroup, first: int, end: int, mask: Mask) -> None:
        """``first`` to ``end`` are positions in the slab's arrays; for rings they are indices.
        ``mask`` is the mask of the queries, (rows, 1, width, positions), "causal" or None."""
        self.first, self.end = first, end
        self.mask = mask
        self.rows = slice(group.first, group.last + 1)
        # Whole axes are used as they are: slicing them costs the host time.
        count = group.slab.rows
        every, stretch = slice(None), slice(first, end)
        of_values = slice(count + group.first, count + group.last + 1)
        self.where = {
            None: (every if group.size == count else self.rows, every, stretch),
            0: (self.rows, every, stretch),
            1: (of_values, every, stretch),
        }
        """Indices, by `ArrayPlace.half`."""


class RowGroup:
    """Adjacent rows of one slab. Rows between the members attend too, but their output is not
    read."""

    def __init__(self, slab: Slab, rows: Sequence[Row], members: range, width: int) -> None:
        """``members`` are the batch indices of ``rows``, and ``width`` is the width of the
        batch."""
        self.slab = slab
        self.first, self.last = rows[0].slot.row, rows[-1].slot.row
        self.members = members
        self._width = width
        self._length = max([row.end for row in rows])
        self._starts = {row.slot.row: row.start for row in rows}

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def batch_rows(self) -> list[int]:
        """Return a batch row for each row of the slab: a member's own, or any."""
        own = dict(zip(self._starts, self.members, strict=True))
        return [own.get(row, self.members[0]) for row in range(self.first, self.last + 1)]

    def places(self) -> list[int]:
        """Return the index of each member among the rows of the slab."""
        return [row - self.first for row in self._starts]

    def reach(self, window: int | None, ring: int | None = None) -> Reach:
        """Return what the rows attend to. With a ``window``, it starts at the first position
        that any of them sees. A ``ring`` shorter than the slab requires a window."""
        if ring is not None and window is not None and ring < self.slab.capacity:
            return self._ring_reach(window, ring)
        width, length, low = self._width, self._length, min(self._starts.values())
        mask: Mask = None
        if self._is_even and width > 1:
            mask = "causal"
            length = low + width  # where the last query of the mask is
        first = 0 if window is None else max(0, low + 1 - window)
        is_cut = window is not None and length > window and not (self._is_even and width == 1)
        if not self._is_even or is_cut or length > self.slab.capacity:
            length = min(length, self.slab.capacity)
            mask = self._mask(mx.arange(first, length), window if is_cut else None, length - 1)
        return Reach(self, first, length, mask)

    def _ring_reach(self, window: int, ring: int) -> Reach:
        """Like `reach`, for arrays that store position p at index ``p % ring``.

        Padding is stored there too, in place of positions that no query of the pass sees."""
        width, low = self._width, min(self._starts.values())
        begun: list[int] = []
        ended: list[int] = []
        for start in self._starts.values():
            first, last = max(0, start + 1 - window), self._last(start)
            turns = first // ring != last // ring
            begun.append(0 if turns else first % ring)
            ended.append(ring if turns else last % ring + 1)
        first, end = min(begun), max(ended)
        if self._is_even and end - first == min(window, low + 1) and width == 1:
            return Reach(self, first, end, None)
        if self._is_even and end == low + width <= window:  # not even part of the ring is used
            return Reach(self, first, end, "causal")
        lasts = mx.array([self._last(start) for start in self._all_starts()])[:, None, None, None]
        held = lasts - (lasts - mx.arange(first, end)) % ring
        return Reach(self, first, end, self._mask(held, window, lasts) & (held >= 0))

    def whole_reach(
        self, reach: Reach, spans: Sequence[tuple[int, int]], ring: int | None
    ) -> Reach:
        """Return ``reach`` of the only row, changed so that the tokens of each of ``spans``
        attend to the whole span. Spans are within the pass."""
        (start,) = self._starts.values()
        places = mx.arange(reach.first, reach.end)
        if ring is not None and ring < self.slab.capacity:
            last = self._last(start)
            places = last - (last - places) % ring
        queries = mx.arange(start, start + self._width)[:, None]
        mask = reach.mask
        if not isinstance(mask, mx.array):  # as for text, without a window
            mask = (places <= queries)[None, None]
        for first, end in spans:
            inside = (queries >= first) & (queries < end) & (places >= first) & (places < end)
            mask = mask | inside
        return Reach(self, reach.first, reach.end, mask)

    @cached_property
    def _is_even(self) -> bool:
        return len(self._starts) == self.size and len(set(self._starts.values())) == 1

    def _last(self, start: int) -> int:
        """Return the last position, padding included, that a row written from ``start`` on
        occupies."""
        return min(start + self._width, self.slab.capacity) - 1

    def _all_starts(self) -> list[int]:
        """Return a start for each row of the slab, or a single one if all are equal."""
        low = min(self._starts.values())
        starts = [self._starts.get(row, low) for row in range(self.first, self.last + 1)]
        return starts[:1] if len(set(starts)) == 1 else starts

    def _mask(self, positions: mx.array, window: int | None, last: int | mx.array) -> mx.array:
        """Return the mask over ``positions``. It has one row if all rows are alike."""
        queries = mx.array(self._all_starts())[:, None, None, None]
        if self._width > 1:
            # Padding attends to something too: the mean of nothing is NaN, which would be stored,
            # and masked values must be finite.
            queries = mx.minimum(queries + mx.arange(self._width)[:, None], last)
        mask = positions <= queries
        return mask if window is None else mask & (positions > queries - window)


def row_groups(
    slab: Slab, first: int, rows: Sequence[Row], width: int, call_cost_tokens: float
) -> list[RowGroup]:
    """Return the groups of ``rows``, the first of which has index ``first`` in the batch."""
    numbers = tuple([row.slot.row for row in rows])
    ends = [row.end for row in rows]
    shortest = min(ends)
    longer = tuple([end - shortest for end in ends])
    cuts = _cuts(numbers, longer, -(-shortest // ROUNDED_TOKENS), call_cost_tokens)
    return [
        RowGroup(slab, rows[a:b], range(first + a, first + b), width) for a, b in pairwise(cuts)
    ]


@lru_cache(maxsize=256)
def _cuts(
    numbers: tuple[int, ...], longer: tuple[int, ...], shortest: int, call_cost_tokens: float
) -> tuple[int, ...]:
    """Return the index of each group's first row, and the number of rows.

    ``longer`` is the difference in length between each row and the shortest one, in tokens;
    ``shortest`` is the shortest length in units of `ROUNDED_TOKENS`."""
    lengths = [shortest * ROUNDED_TOKENS + each for each in longer]
    runs = split_runs(numbers, lengths, call_cost_tokens)
    return (*(numbers.index(run.first) for run in runs), len(numbers))
