"""Attention over pages as operations of MLX's graph, as few as possible.

On a GPU each operation is a kernel. Its launch and the host's time to build it cost more than a few
thousand positions of padding. Therefore the keys and values of all rows are written in one operation
for each layer, rows attend together unless their lengths differ by a lot, and whatever is the same
in every layer is created once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import mlx.core as mx

from engine.batch.ragged import RaggedBatch, Row
from engine.cache.graph_pages import GraphPages, PageFormat
from engine.cache.grouping import split_runs
from engine.cache.layout import Layout
from engine.cache.slots import Slots

Mask: TypeAlias = mx.array | str | None


class Reach:
    """The positions that some rows of a batch attend to within a window."""

    def __init__(self, tables: mx.array, first: int, end: int, mask: Mask) -> None:
        """``tables`` (rows, pages) are the pages to gather, the first of which begins at position
        ``first``. Positions from ``end`` on are cut off. ``mask`` is (rows or 1, 1, queries,
        positions), "causal" or None."""
        self.tables, self.first, self.end, self.mask = tables, first, end, mask


class RowGroup:
    """Rows of a batch that attend in one call, padded to the longest."""

    def __init__(
        self, rows: Sequence[Row], tables: Sequence[Sequence[int]], page_tokens: int, width: int
    ) -> None:
        self._starts = [row.start for row in rows]
        self._ends = [row.end for row in rows]
        self._tables, self._size, self._width = tables, page_tokens, width
        self._is_even = len(set(self._starts)) == 1

    def reach(self, window: int | None, spans: Sequence[tuple[int, int]] = ()) -> Reach:
        """Return what the rows attend to. With a ``window``, it starts with the first page that any
        of them sees. The tokens of each of ``spans``, in the only row, attend to the whole span."""
        low, width, size = min(self._starts), self._width, self._size
        # Of even rows, the last query of the mask is at the end, in padding or not.
        end = low + width if self._is_even else max(self._ends)
        seen = 0 if window is None else max(0, low + 1 - window)
        first = seen // size * size
        is_cut = window is not None and end - first > window
        tables = self._padded(first // size, -(-end // size))
        if self._is_even and not is_cut and not spans:
            return Reach(tables, first, end, "causal" if width > 1 else None)
        positions = mx.arange(first, end)
        starts = self._starts[:1] if self._is_even else self._starts
        queries = mx.array(starts)[:, None, None, None]
        if width > 1:
            # Padding attends to something too: the mean of nothing is NaN, which would be stored.
            queries = mx.minimum(queries + mx.arange(width)[:, None], end - 1)
        mask = positions <= queries
        if is_cut:
            mask = mask & (positions > queries - window)
        for begin, last in spans:
            inside = (queries >= begin) & (queries < last)
            mask = mask | (inside & (positions >= begin) & (positions < last))
        return Reach(tables, first, end, mask)

    def whole(self, end: int) -> Reach:
        """Return all positions up to ``end``, without a mask."""
        return Reach(self._padded(0, -(-end // self._size)), 0, end, None)

    def _padded(self, first: int, count: int) -> mx.array:
        pages = [table[first:count] for table in self._tables]
        return mx.array([[*some, *[0] * (count - first - len(some))] for some in pages])

    @cached_property
    def ends(self) -> mx.array:
        return mx.array(self._ends)[:, None, None, None]


class GraphBatch(RaggedBatch):
    """Rows are written together, and attend group by group."""

    pages_class = GraphPages

    call_cost_tokens: float = 150
    """Fixed cost of one attention call over one layer with one query per row, see
    `engine.cache.grouping`."""

    query_cost = 1.0
    """What each further query of a row adds to the cost of a position, as a fraction of the
    first."""

    def __init__(self, layout: Layout, slots: Slots, rows: Sequence[Row]) -> None:
        super().__init__(layout, slots, rows)
        assert isinstance(slots.pages, GraphPages)
        self._pages = slots.pages
        self._places: dict[PageFormat, mx.array] = {}
        self._reaches: dict[int | None, list[Reach]] = {}

    @cached_property
    def _tokens(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Pages and indices of all new tokens, and the numbers of these tokens in the padded batch:
        None if nothing is padded."""
        size, width = self._pages.page_tokens, self.width
        pages, indices, numbers = [], [], []
        for i, (row, table) in enumerate(zip(self.rows, self.tables, strict=True)):
            for position in range(row.start, row.end):
                pages.append(table[position // size])
                indices.append(position % size)
            numbers += range(i * width, i * width + row.width)
        is_padded = len(numbers) < len(self.rows) * width
        return mx.array(pages), mx.array(indices), mx.array(numbers) if is_padded else None

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        pages, indices, numbers = self._tokens
        form = self._pages.formats[layer]
        places = self._places.get(form)
        if places is None:
            places = self._places[form] = form.places(pages, indices)
        both = []
        for new in (keys, values):
            flat = new.swapaxes(1, 2).flatten(0, 1)  # (tokens, kv_heads, dim)
            both.append(flat if numbers is None else flat[numbers])
        self._pages.write(layer, places, *both)

    @cached_property
    def _members(self) -> list[list[int]]:
        """The rows of each group, by length."""
        order = sorted(range(len(self.rows)), key=lambda i: self.rows[i].end)
        cost = self.call_cost_tokens / (1 + self.query_cost * (self.width - 1))
        lengths = [self.rows[i].end for i in order]
        runs = split_runs(range(len(order)), lengths, cost)
        return [order[run.first : run.last + 1] for run in runs]

    @cached_property
    def _groups(self) -> list[RowGroup]:
        size = self._pages.page_tokens
        return [
            RowGroup(
                [self.rows[i] for i in members],
                [self.tables[i] for i in members],
                size,
                self.width,
            )
            for members in self._members
        ]

    @cached_property
    def _order(self) -> tuple[mx.array, mx.array] | None:
        """The rows in the order of groups, and the inverse; None if it is the batch's."""
        order = [i for members in self._members for i in members]
        if order == list(range(len(order))):
            return None
        return mx.array(order), mx.array(sorted(range(len(order)), key=order.__getitem__))

    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        if window not in self._reaches:
            spans = () if self.given is None else self.given.spans
            self._reaches[window] = [group.reach(window, spans) for group in self._groups]
        if (order := self._order) is not None:
            query = query[order[0]]
        outputs, first = [], 0
        for group, members, reach in zip(
            self._groups, self._members, self._reaches[window], strict=True
        ):
            last = first + len(members)
            asked = query if len(self._groups) == 1 else query[first:last]
            keys, values = (self._gathered(layer, group, reach, half) for half in (0, 1))
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    asked, keys, values, scale=scale, mask=reach.mask, sinks=sinks
                )
            )
            first = last
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        return out if order is None else out[order[1]]

    def _gathered(self, layer: int, group: RowGroup, reach: Reach, half: int) -> mx.array:
        """Return keys or values (rows, kv_heads, positions, dim), with zeros behind each row's end:
        what pages hold there may be NaN."""
        found = self._pages.gather(layer, reach.tables, half).array
        found = found[:, :, : reach.end - reach.first]
        positions = mx.arange(reach.first, reach.end)[:, None]
        return mx.where(positions < group.ends, found, mx.array(0, found.dtype))
