"""Positions in the slabs for the new keys and values of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TypeAlias

import mlx.core as mx

from engine.batch.ragged import Row
from engine.cache.slabs import Slab

Index: TypeAlias = tuple[slice | mx.array, ...]
Part: TypeAlias = tuple[int, int, int] | None
"""Rows of a batch, from and to (exclusive), and their width. None for the whole batch."""

_ALL = slice(None)


class Place:
    """New positions of adjacent rows of a batch, all in one slab, written in one operation."""

    def __init__(
        self, slab: Slab, part: Part, rows: Sequence[Row], width: int, ring: int | None
    ) -> None:
        """``part`` selects the ``rows`` in the batch; ``width`` positions are written for each,
        with padding written where there is no token. ``ring``: see `AttentionLayout.ring_tokens`.
        """
        self.slab = slab
        self._ring = slab.capacity if ring is None else ring
        self.part = part
        self._rows = tuple([row.slot.row for row in rows])
        self._starts = [row.start for row in rows]
        self._width = width
        self._indices: dict[tuple[int, tuple[int, ...]], tuple[mx.array, ...]] = {}
        first, start = rows[0].slot.row, rows[0].start
        self._rectangle: tuple[slice, slice, slice] | None = None
        index = start % self._ring
        if index + width <= self._ring and all(
            row.slot.row == first + i and row.start == start for i, row in enumerate(rows)
        ):
            end = first + len(rows)
            self._rectangle = slice(first, end), _ALL, slice(index, index + width)

    def put(self, number: int, array: mx.array) -> None:
        """Write ``array`` (batch, kv_heads, width, ...) of the whole batch into keys or values
        ``number`` of the slab."""
        place = self.slab.places[number]
        index: Index
        if place.half == 1:
            index = self.indices(array.shape[1], (self.slab.rows,))
        else:
            index = self._rectangle or self.indices(array.shape[1])
        self.slab.arrays[place.array][index] = of_part(array, self.part)

    def put_scales(self, array: int, indices: tuple[int, ...], scales: mx.array) -> None:
        """Write ``scales`` (arrays, 2, batch, kv_heads, width, groups) at ``indices`` of the first
        axis of ``Slab.scales[array]``."""
        target = self.slab.scales[array]
        scales = of_part(scales, self.part)
        if self._rectangle is not None and indices == tuple(range(target.shape[0])):
            target[(_ALL, _ALL, *self._rectangle)] = scales
        else:
            index = (*_arrays_and_both(indices), *self.indices(scales.shape[3]))
            target[index] = scales.flatten(0, 1)

    def indices(self, heads: int, first_rows: tuple[int, ...] = ()) -> tuple[mx.array, ...]:
        """Return rows, heads and positions in an array of the slab for all tokens: (rows, heads,
        width). They are created once. With ``first_rows``, the index of row 0 of the slab in the
        array, they are (first rows, rows, heads, width)."""
        found = self._indices.get((heads, first_rows))
        if found is None:
            rows, each = _rows_and_heads(self._rows, heads, self._width, first_rows)
            found = rows, each, mx.broadcast_to(self._positions, rows.shape)
            self._indices[heads, first_rows] = found
        return found

    @cached_property
    def _positions(self) -> mx.array:
        """Indices of all tokens, (rows, 1, width)."""
        last, width, ring = self.slab.capacity - 1, self._width, self._ring
        # Padding may share a position: any position without a token will do.
        found = [min(start + i, last) % ring for start in self._starts for i in range(width)]
        return mx.array(found).reshape(-1, 1, width)


@lru_cache(maxsize=64)
def _arrays_and_both(indices: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """Return the first two indices of `Place.put_scales`, which are the same in every step.

    They have one axis together: CUDA writes at indices only if their axes and those of the target
    are ten at most."""
    arrays = mx.array([index for index in indices for _ in range(2)])
    return arrays.reshape(-1, 1, 1, 1), mx.array([0, 1] * len(indices)).reshape(-1, 1, 1, 1)


@lru_cache(maxsize=64)
def _rows_and_heads(
    numbers: tuple[int, ...], heads: int, width: int, first_rows: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """Return the first two of `Place.indices`, for rows ``numbers`` of a slab. They are the same in
    many steps.

    Not slices: for a slice among indices, MLX would create and cast an index in each call."""
    shape = (*[len(first_rows)] * bool(first_rows), len(numbers), heads, width)
    rows = mx.array([first + row for first in first_rows or (0,) for row in numbers])
    each = mx.array(list(range(heads)), mx.int32).reshape(-1, 1)  # no kernel: it may fail
    rows = rows.reshape(*shape[:-2], 1, 1)
    return mx.broadcast_to(rows, shape), mx.broadcast_to(each, shape)


def of_part(array: mx.array, part: Part) -> mx.array:
    """Return a ``part`` of ``array`` (..., batch, kv_heads, width, dim)."""
    return array if part is None else array[..., part[0] : part[1], :, : part[2], :]


def places(
    by_slab: Iterator[tuple[Slab, int, Sequence[Row]]], count: int, ring: int | None = None
) -> list[Place]:
    """Return where the ``count`` rows of a batch are written, given its rows `by_slab`, in layers
    with this ``ring``."""
    found = []
    for slab, first, rows in by_slab:
        width = max(row.width for row in rows)
        part = None if count == len(rows) else (first, first + len(rows), width)
        found.append(Place(slab, part, rows, width, ring))
    return found


def sources(by_slab: Iterator[tuple[Slab, int, Sequence[Row]]]) -> mx.array | None:
    """Return, for each token (batch, 1, width, 1), the token whose keys and values are written in
    its place: the last token of a row instead of padding. None if every token can be itself.

    The padding of a full row is written over its last token, and must therefore be equal to it."""
    widths: list[int] = []
    is_full = False
    for slab, _, rows in by_slab:
        width = max(row.width for row in rows)
        is_full = is_full or any(r.width < width and r.end == slab.capacity for r in rows)
        widths += (row.width for row in rows)
    if not is_full:
        return None
    tokens = [[min(i, width - 1) for i in range(max(widths))] for width in widths]
    return mx.array(tokens)[:, None, :, None]
