"""Attention over slabs with as few operations as possible, for GPUs.

There each operation of MLX's graph is a kernel, and its launch and the host's time to build it
cost more than a few thousand positions of padding. So keys and values of all rows of a slab are
written in one operation each, and rows attend together unless their lengths differ by a lot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from engine.batch.graph import GraphBatch
from engine.batch.ragged import Row
from engine.cache.layout import Layout
from engine.cache.slabs import Slab, Slabs, StoredKV


class _Stretch(NamedTuple):
    """Where one token of each row goes: the same position of neighbouring rows."""

    rows: slice
    positions: slice


class _Scattered(NamedTuple):
    """Where one token of each row goes: a position for each row. Both are (rows, 1)."""

    rows: mx.array
    positions: mx.array


class GPUBatch(GraphBatch):
    """Decoding rows of a slab are written at once, and attend in one call or a few."""

    call_cost_tokens = 8_192
    """A guess: two more operations in every layer, in positions of a small model's keys."""

    def __init__(self, layout: Layout, slabs: Slabs, rows: Sequence[Row]) -> None:
        super().__init__(layout, slabs, rows)
        self._places: list[tuple[Slab, slice, _Stretch | _Scattered]] = []
        if self.decoding:
            for slab, first, members in self.by_slab():
                part = slice(first, first + len(members))
                self._places.append((slab, part, _place(members)))
        self._heads: dict[int, mx.array] = {}
        self._scale_or_bias = mx.array([0, 1])[:, None, None]
        self._gather, self._scatter = self._order() if self.decoding else (None, None)

    def _order(self) -> tuple[mx.array | None, mx.array | None]:
        """Return a row of the batch for each row that attends, and the place of each row of the
        batch among those. None if they are the same: no group has a row between its members."""
        if all(group.gather is None for group in self._groups):
            return None, None
        gather: list[int] = []
        scatter: list[int] = []
        for group in self._groups:
            at = {self.rows[i].slot.row: i for i in group.members}
            scatter += [len(gather) + row - group.first for row in at]
            gather += [at.get(n, group.members[0]) for n in range(group.first, group.last + 1)]
        return mx.array(gather), mx.array(scatter)

    def attend(
        self,
        layer: int,
        query: mx.array,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        if not self.decoding or self._multiplies_codes(layer):
            return super().attend(layer, query, scale, window, sinks)
        if self._gather is not None:
            query = query[self._gather]
        outputs, first = [], 0
        for number, group in enumerate(self._groups):
            end = first + group.last - group.first + 1
            keys, values = group.keys_and_values(layer)
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    query if len(self._groups) == 1 else query[first:end],
                    keys,
                    values,
                    scale=scale,
                    mask=self._mask(number, group, window),
                    sinks=sinks,
                )
            )
            first = end
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return out if self._scatter is None else out[self._scatter]

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        if not self.decoding:
            super().write(layer, keys, values)
            return
        for number, kept in enumerate(self._stored(layer, keys, values), 2 * layer):
            if kept.array.size:
                self._write_tokens(number, kept)

    def _stored(self, layer: int, keys: mx.array, values: mx.array) -> Sequence[StoredKV]:
        return StoredKV.of_both(keys, values, self.layout.arrays[2 * layer : 2 * layer + 2])

    def _write_tokens(self, number: int, kept: StoredKV) -> None:
        """Write one token of each row into array ``number`` of the slabs."""
        for slab, part, place in self._places:
            array = kept.array if len(self._places) == 1 else kept.array[part]
            scales = kept.scales
            if isinstance(place, _Stretch):
                slab.arrays[number][place.rows, :, place.positions] = array
                if scales is not None:
                    slab.scales[number][:, place.rows, :, place.positions] = scales[:, part]
                continue
            # With a slice among the indices MLX would make and cast an index for it each time.
            heads = self._head_indices(array.shape[1])
            slab.arrays[number][place.rows, heads, place.positions] = array[:, :, 0]
            if scales is not None:
                where = self._scale_or_bias, place.rows, heads, place.positions
                slab.scales[number][where] = scales[:, part, :, 0]

    def _head_indices(self, count: int) -> mx.array:
        if count not in self._heads:
            self._heads[count] = mx.arange(count, dtype=mx.int32)[None]
        return self._heads[count]


def _place(rows: Sequence[Row]) -> _Stretch | _Scattered:
    first, start = rows[0].slot.row, rows[0].start
    if all(row.slot.row == first + i and row.start == start for i, row in enumerate(rows)):
        return _Stretch(slice(first, first + len(rows)), slice(start, start + 1))
    numbers, positions = [row.slot.row for row in rows], [row.start for row in rows]
    return _Scattered(mx.array(numbers)[:, None], mx.array(positions)[:, None])
