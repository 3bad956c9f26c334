"""Attention over slabs as operations of MLX's graph: for GPUs, and for 16 bits on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from engine.batch.ragged import RaggedBatch, Row
from engine.cache.grouping import split_runs
from engine.cache.layout import Layout
from engine.cache.quantization import KERNEL_GROUPS
from engine.cache.slabs import Slab, Slabs, StoredKV

Mask: TypeAlias = mx.array | str | None


@dataclass(frozen=True)
class _RowGroup:
    """Rows of one slab that attend in one call."""

    slab: Slab
    first: int  # first row of the slab
    last: int  # last row of the slab, inclusive
    length: int  # positions of the longest row
    members: tuple[int, ...]  # indices of the rows in the batch
    gather: mx.array | None = None
    """A row of the batch for each row of the slab. None if the members are exactly those rows."""
    scatter: mx.array | None = None
    """The place of each member among the rows of the slab. None like ``gather``."""

    @property
    def row_slice(self) -> slice:
        return slice(self.first, self.last + 1)

    def keys_and_values(self, layer: int) -> tuple[mx.array, mx.array]:
        keys = self.slab.read(2 * layer, self.row_slice, self.length)
        return keys, self.slab.read(2 * layer + 1, self.row_slice, self.length)


class GraphBatch(RaggedBatch):
    """Decoding rows attend run by run, rows of a prefill one by one."""

    call_cost_tokens = 150
    """Fixed cost of one attention call over one layer, see `engine.cache.grouping`."""

    multiplies_codes = mx.default_device() == mx.gpu
    """Whether decoding rows attend directly to codes, without dequantizing them.

    On the CPU that takes several times as long as attention to fp32. For the many queries of a
    prefill the codes are dequantized, and attention does not keep the scores."""

    def __init__(self, layout: Layout, slabs: Slabs, rows: Sequence[Row]) -> None:
        super().__init__(layout, slabs, rows)
        self._masks: dict[tuple[int, int | None], Mask] = {}
        # Of each slab the batch's first row and end, and its rows and positions if scattered.
        self._slabs: list[tuple[Slab, int, int, tuple[mx.array, mx.array] | None]] = []
        self._groups: list[_RowGroup] = []
        for slab, first, stretch in self.by_slab():
            self._add(slab, first, stretch)

    def _add(self, slab: Slab, first: int, rows: Sequence[Row]) -> None:
        numbers = [row.slot.row for row in rows]
        places = None
        if self.decoding and len(rows) > 2:
            places = mx.array(numbers), mx.array([row.start for row in rows])
        self._slabs.append((slab, first, first + len(rows), places))
        if not self.decoding:
            for i, row in enumerate(rows, first):
                number = row.slot.row
                self._groups.append(_RowGroup(slab, number, number, row.end, (i,)))
            return
        for run in split_runs(numbers, [row.end for row in rows], self.call_cost_tokens):
            inside = [i for i, n in enumerate(numbers, first) if run.first <= n <= run.last]
            gather = scatter = None
            if len(inside) != run.last - run.first + 1:
                at = {self.rows[i].slot.row: i for i in inside}
                gather = mx.array([at.get(n, inside[0]) for n in range(run.first, run.last + 1)])
                scatter = mx.array([row - run.first for row in at])
            self._groups.append(_RowGroup(slab, *run, tuple(inside), gather, scatter))

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        for number, kept in enumerate(self._stored(layer, keys, values), 2 * layer):
            if kept.array.size == 0:
                continue
            for slab, first, end, places in self._slabs:
                if places is not None:
                    slab.put_each(number, *places, kept.batch(first, end))
                    continue
                for i in range(first, end):
                    row = self.rows[i]
                    slab.put(number, row.slot.row, row.start, kept.row(i, row.width))

    def _stored(self, layer: int, keys: mx.array, values: mx.array) -> Sequence[StoredKV]:
        """Return keys and values in the form that slabs keep."""
        kinds = self.layout.arrays[2 * layer : 2 * layer + 2]
        return [StoredKV.of(new, kind) for new, kind in zip((keys, values), kinds, strict=True)]

    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        outputs: list[mx.array] = []
        for number, group in enumerate(self._groups):
            mask = self._mask(number, group, window)
            first, last = group.members[0], group.members[-1] + 1
            width = self.rows[first].width  # 1 in all rows of a decode
            rows = slice(first, last) if group.gather is None else group.gather
            asked = query[rows][:, :, :width]
            if self.decoding and sinks is None and self._multiplies_codes(layer):
                out = _quantized_attention(asked, group, layer, scale, mask, self.layout)
            else:
                keys, values = group.keys_and_values(layer)
                out = mx.fast.scaled_dot_product_attention(
                    asked, keys, values, scale=scale, mask=mask, sinks=sinks
                )
            if group.scatter is not None:
                out = out[group.scatter]
            if padding := query.shape[2] - width:
                out = mx.pad(out, [(0, 0), (0, 0), (0, padding), (0, 0)])
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _multiplies_codes(self, layer: int) -> bool:
        return self.multiplies_codes and all(
            kind.quantization is not None
            and kind.quantization.group_size in KERNEL_GROUPS
            and not kind.dequantized
            for kind in self.layout.arrays[2 * layer : 2 * layer + 2]
        )

    def _mask(self, number: int, group: _RowGroup, window: int | None) -> Mask:
        key = (number, window)
        if key not in self._masks:
            self._masks[key] = self._make_mask(group, window)
        return self._masks[key]

    def _make_mask(self, group: _RowGroup, window: int | None) -> Mask:
        if window is not None and group.length <= window:
            window = None
        if not self.decoding:
            row = self.rows[group.members[0]]
            if window is None:
                return "causal" if row.width > 1 else None
            queries = mx.arange(row.start, row.end)[:, None]
            positions = mx.arange(group.length)[None]
            return (positions <= queries) & (positions > queries - window)
        ends = {self.rows[i].slot.row: self.rows[i].end for i in group.members}
        if window is None and group.gather is None and set(ends.values()) == {group.length}:
            return None
        # A row between the members attends to one position. Its output is not read.
        lengths = mx.array([ends.get(n, 1) for n in range(group.first, group.last + 1)])[:, None]
        positions = mx.arange(group.length)[None]
        mask = positions < lengths
        if window is not None:
            mask = mask & (positions >= lengths - window)
        return mask[:, None, None]


def _quantized_attention(
    queries: mx.array, group: _RowGroup, layer: int, scale: float, mask: Mask, layout: Layout
) -> mx.array:
    """Return the attention of ``queries`` (rows, heads, 1, dim) to codes.

    Computed in fp32, since the scales are wider than bfloat16."""
    rows, heads = queries.shape[:2]
    kv_heads = layout.layers[layer].kv_heads

    def product(x: mx.array, number: int, transpose: bool) -> mx.array:
        how = layout.arrays[number].quantization
        assert how is not None
        codes = group.slab.arrays[number][group.row_slice, :, : group.length]
        scales = group.slab.scales[number][:, group.row_slice, :, : group.length]
        wide = scales.astype(mx.float32)
        return mx.quantized_matmul(
            x, codes, *wide, transpose=transpose, group_size=how.group_size, bits=how.bits
        )

    asked = queries.astype(mx.float32).reshape(rows, kv_heads, heads // kv_heads, -1) * scale
    scores = product(asked, 2 * layer, transpose=True)
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, -mx.inf)
    out = product(mx.softmax(scores, axis=-1), 2 * layer + 1, transpose=False)
    return out.reshape(rows, heads, 1, -1).astype(queries.dtype)
