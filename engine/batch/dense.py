"""Batches for models that use keys, values or masks outside mlx-lm's attention.

Some models compute with the keys, or expand, cut or cast them. For these, each layer's cache
returns arrays: the rows' pages gathered side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx

from engine.batch.axes import Axes
from engine.batch.graph import GraphBatch, Mask, Reach
from engine.batch.ragged import Row, effective_window
from engine.cache.layout import AttentionLayout, Layout
from engine.cache.slots import Slots


class DenseBatch(GraphBatch):
    """Decodes rows in one pass, padded to the longest, under a mask, and prefills row by row.

    A chunk is computed as with mlx-lm's own caches, except that windows are masks too."""

    batching = "dense"
    pads_rows = False
    attends = False
    mask_axes = 4
    """Axes of a mask for several rows: (batch, heads, queries, keys)."""

    def __init__(self, layout: Layout, slots: Slots, rows: Sequence[Row]) -> None:
        super().__init__(layout, slots, rows)
        self.longest = max(row.end for row in rows)
        self._dense_masks: dict[int | None, mx.array] = {}

    def kv_view(self, number: int, layer: AttentionLayout) -> Any:
        return DenseKVCacheView(self, number, layer)

    @cached_property
    def _whole(self) -> Reach:
        return Reach(self.rows, self.tables, self._pages.page_tokens, self.width)

    def fetch(self, number: int) -> mx.array:
        """Return array ``number`` of the layout: (batch, kv_heads, longest, dim)."""
        layer, half = divmod(number, 2)
        reach = self._whole
        where = reach.where(self._pages.formats[layer].heads)
        return reach.cut(self._pages.gather_half(layer, half, where, reach.exists))

    def mask(self, window: int | None) -> mx.array:
        """Return the mask of each row's own positions, within the last ``window``.

        It is (batch, 1, 1, keys) for several decoding rows, (queries, keys) for one row."""
        if window not in self._dense_masks:
            positions = mx.arange(self.longest)
            if len(self.rows) == 1:
                ends = mx.arange(self.rows[0].start, self.rows[0].end)[:, None]
            else:
                ends = mx.array([row.start for row in self.rows])
                ends = ends.reshape(-1, *[1] * (self.mask_axes - 1))
            mask = positions <= ends
            if window is not None:
                mask = mask & (positions > ends - window)
            self._dense_masks[window] = mask
        return self._dense_masks[window]


class GroupedDenseBatch(DenseBatch):
    """A dense batch for models that split heads into groups before they apply the mask."""

    mask_axes = 5


class RowBatch(DenseBatch):
    """One pass per row, for models that use a single position for all rows."""

    batching = "row by row"
    one_row_per_pass = True


class DenseKVCacheView:
    """One layer's cache that returns arrays, as mlx-lm's caches do."""

    start_position = 0
    """First position of a chunked cache. This cache keeps all positions."""

    def __init__(self, batch: DenseBatch, number: int, layer: AttentionLayout) -> None:
        self.batch = batch
        self._number = number
        self._window = layer.window

    @property
    def offset(self) -> int | mx.array | Axes:
        return self.batch.turned_by

    @property
    def keys(self) -> mx.array:
        return self.batch.fetch(2 * self._number)

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        """Ignore ``keys``. Some models make the keys depend on other arrays so that those are
        evaluated; here they are evaluated anyway."""

    @property
    def values(self) -> mx.array:
        return self.batch.fetch(2 * self._number + 1)

    @values.setter
    def values(self, values: mx.array) -> None:
        """Ignore ``values``, as `keys` does."""

    def maybe_trim_front(self) -> None:
        """Do nothing: positions before the window are masked."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.batch.division is not None:
            self.batch.division.enter_layer(self._number, keys, values)
        self.batch.write(self._number, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        window = effective_window(window_size, self._window)
        if window is not None and self.batch.longest <= window:
            window = None
        if len(self.batch.rows) == 1 and window is None:
            if N == 1:
                return None
            if not return_array:
                return "causal"
        return self.batch.mask(window)
