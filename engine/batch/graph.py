"""Attention over slabs as operations of MLX's graph, as few as possible.

On a GPU each operation is a kernel. Its launch and the host's time to build it cost more than a
few thousand positions of padding. Therefore keys and values of all rows of a slab are written in
one operation each, rows attend together unless their lengths differ by a lot, and whatever is
the same in every layer is created once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import mlx.core as mx

from engine.batch.given import Given
from engine.batch.groups import Reach, RowGroup, row_groups
from engine.batch.places import places, sources
from engine.batch.ragged import RaggedBatch, Row
from engine.batch.writing import SlabWriter
from engine.cache.layout import AttentionLayout, Layout
from engine.cache.slabs import Slab, Slabs

GroupReach: TypeAlias = tuple[RowGroup, slice, Reach]


class GraphBatch(RaggedBatch):
    """Rows are written slab by slab, and attend group by group."""

    call_cost_tokens: float = 150
    """Fixed cost of one attention call over one layer with one query per row, see
    `engine.cache.grouping`."""

    query_cost = 1.0
    """What each further query of a row adds to the cost of a position, as a fraction of the
    first."""

    compiles = mx.default_device() == mx.gpu
    """Whether rounding is compiled. On a CPU that would require a compiler on the server."""

    def __init__(self, layout: Layout, slabs: Slabs, rows: Sequence[Row]) -> None:
        super().__init__(layout, slabs, rows)
        self._sources = None if self.decoding else sources(self.by_slab())
        self._writers: dict[int | None, SlabWriter] = {}
        self._reaches: dict[tuple[int | None, int | None], list[GroupReach]] = {}
        self._slab_rows = self._rows_of_slabs()
        # Slots contain values, so attention reads them directly.
        self._holds_values = layout.dequantized or layout.precision.bits == 16

    def by_slab(self) -> Iterator[tuple[Slab, int, Sequence[Row]]]:
        return iter(self._stretches)

    @cached_property
    def _stretches(self) -> list[tuple[Slab, int, Sequence[Row]]]:
        return list(super().by_slab())

    def resume(self) -> None:
        """Look up places again if slabs have a different number of rows by now: values come
        after the keys of all rows."""
        if (rows := self._rows_of_slabs()) != self._slab_rows:
            self.finish_writes()
            self._writers.clear()
            self._reaches.clear()
            self._slab_rows = rows

    def _rows_of_slabs(self) -> list[int]:
        return [slab.rows for slab, _, _ in self.by_slab()]

    @cached_property
    def _groups(self) -> list[RowGroup]:
        cost = self.call_cost_tokens / (1 + self.query_cost * (self.width - 1))
        return [
            group
            for slab, first, rows in self.by_slab()
            for group in row_groups(slab, first, rows, self.width, cost)
        ]

    @cached_property
    def _order(self) -> tuple[mx.array, mx.array] | None:
        """The batch row of each attending row, and the index of each batch row among those. None
        if they are the same, because no group has other rows between its members."""
        total = sum(group.size for group in self._groups)
        if total == len(self.rows):
            return None
        gather: list[int] = []
        scatter: list[int] = []
        for group in self._groups:
            scatter += [len(gather) + place for place in group.places()]
            gather += group.batch_rows()
        return mx.array(gather), mx.array(scatter)

    def logits(
        self, model: Any, inputs: mx.array, *, kv_only: bool = False, given: Given | None = None
    ) -> mx.array:
        found = super().logits(model, inputs, kv_only=kv_only, given=given)
        self.finish_writes()
        return found

    def finish_writes(self) -> None:
        """Write what the layers' writes left for the end of the pass."""
        for writer in self._writers.values():
            writer.flush()

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        ring = self.layout.layers[layer].ring_tokens
        writer = self._writers.get(ring) or self._writer(ring)
        writer.write(layer, keys, values)

    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        its = self.layout.layers[layer]
        if its.ring_tokens is not None and its.window is not None:  # nothing more is kept
            window = min(window or its.window, its.window)
        reaches = self._reaches.get((window, its.ring_tokens)) or self._reach(window, its)
        order = self._order
        if order is not None:
            query = query[order[0]]
        places = self.layout.places
        keys_at, values_at = places[2 * layer], places[2 * layer + 1]
        outputs = []
        for group, part, reach in reaches:
            if self._holds_values:
                arrays = group.slab.arrays
                keys = arrays[keys_at.array][reach.where[keys_at.half]]
                values = arrays[values_at.array][reach.where[values_at.half]]
            else:
                keys, values = (
                    group.slab.read(number, reach.rows, reach.end, reach.first)
                    for number in (2 * layer, 2 * layer + 1)
                )
            asked = query if len(reaches) == 1 else query[part]
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    asked, keys, values, scale=scale, mask=reach.mask, sinks=sinks
                )
            )
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return out if order is None else out[order[1]]

    def _writer(self, ring: int | None) -> SlabWriter:
        where = places(self.by_slab(), len(self.rows), ring)
        writer = SlabWriter(self.layout, where, self._sources, self.compiles)
        self._writers[ring] = writer
        return writer

    def _reach(self, window: int | None, layer: AttentionLayout) -> list[GroupReach]:
        """Return the groups, their queries, and what they attend to."""
        reaches, first = [], 0
        for group in self._groups:
            reach = group.reach(window, layer.ring_tokens)
            if self.given is not None and self.given.spans:
                reach = group.whole_reach(reach, self.given.spans, layer.ring_tokens)
            reaches.append((group, slice(first, first + group.size), reach))
            first += group.size
        self._reaches[window, layer.ring_tokens] = reaches
        return reaches
