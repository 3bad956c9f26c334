"""Attention over pages as operations of MLX's graph, as few as possible.

On a GPU each operation is a kernel. Its launch and the host's time to build it cost more than a few
thousand positions of padding. Therefore the keys and values of all rows are written in one
operation for each layer, rows attend together unless their lengths differ by a lot, and whatever is
the same in every layer is created once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import mlx.core as mx

from engine.batch.ragged import RaggedBatch, Row
from engine.cache.graph_pages import GraphPages
from engine.cache.grouping import split_runs
from engine.cache.layout import Layout
from engine.cache.page_format import PageFormat, pages_of_heads
from engine.cache.slots import Slots

Mask: TypeAlias = mx.array | str | None

MAX_GATHERED_BYTES = 64 << 20
"""Max bytes of a layer's values that are gathered for one call, unless one row has more. The ledger
has the longest row; shorter ones are temporary arrays like those of other operations."""


class Reach:
    """The positions that some rows attend to in one call, padded to the longest row."""

    def __init__(
        self,
        rows: Sequence[Row],
        tables: Sequence[Sequence[int]],
        page_tokens: int,
        width: int,
        window: int | None = None,
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        """``width`` is the number of queries of each row. Within a ``window``, only its pages are
        gathered. The tokens of each of ``spans``, in the only row, attend to the whole span."""
        starts = [row.start for row in rows]
        is_even = len({(row.start, row.end) for row in rows}) == 1 and rows[0].width == width
        seen = [0 if window is None else max(0, start + 1 - window) for start in starts]
        pages = [first // page_tokens for first in seen]
        firsts = [page * page_tokens for page in pages]  # the position of the first gathered one
        self._where: dict[int, mx.array] = {}
        self.ends = [row.end - first for row, first in zip(rows, firsts, strict=True)]
        """The number of gathered positions of each row that exist."""
        count = max(self.ends)
        num_pages = -(-count // page_tokens)
        self.pages = [
            table[page : page + num_pages] for table, page in zip(tables, pages, strict=True)
        ]
        """The pages to gather of each row."""
        self.exists: mx.array | None = None
        """Which of the gathered positions exist, (rows, 1, positions). None: all that are used."""
        self.first, self.end = 0, count
        """The gathered positions that are used."""
        self.mask: Mask = "causal" if width > 1 else None
        if is_even and width == 1:
            self.first = seen[0] - firsts[0]
            return
        is_cut = window is not None and max(row.end for row in rows) > window
        if is_even and not is_cut and not spans:
            return
        if not is_even:
            gathered = mx.arange(num_pages * page_tokens)
            self.exists = gathered < mx.array(self.ends)[:, None, None]
        some = slice(1 if is_even else None)
        positions = mx.arange(count) + mx.array(firsts[some])[:, None, None, None]
        queries = mx.array(starts[some])[:, None, None, None] + mx.arange(width)[:, None]
        # Padding attends to something too: a kernel may return NaN for a query that sees nothing.
        lasts = mx.array([row.end - 1 for row in rows[some]])
        queries = mx.minimum(queries, lasts[:, None, None, None])
        mask = positions <= queries
        if is_cut:
            mask = mask & (positions > queries - window)
        for begin, end in spans:
            inside = (queries >= begin) & (queries < end)
            mask = mask | (inside & (positions >= begin) & (positions < end))
        self.mask = mask

    def where(self, heads: int) -> mx.array:
        """Return the pages of each head to gather (`pages_of_heads`), the same in all layers."""
        if heads not in self._where:
            self._where[heads] = pages_of_heads(self._table, heads)
        return self._where[heads]

    @cached_property
    def _table(self) -> mx.array:
        """The pages to gather, (rows, pages). A row has a page of its own in place of those that it
        lacks."""
        longest = max(map(len, self.pages))
        padded = [[*pages, *[pages[-1]] * (longest - len(pages))] for pages in self.pages]
        return mx.array(padded, mx.uint32)

    def cut(self, gathered: mx.array) -> mx.array:
        """Return the positions that are used of ``gathered`` keys or values."""
        if self.first == 0 and self.end == gathered.shape[2]:
            return gathered
        return gathered[:, :, self.first : self.end]


class GraphBatch(RaggedBatch):
    """Rows are written together, and attend group by group."""

    pages_class = GraphPages

    call_cost_tokens: float = 150
    """Fixed cost of one attention call over one layer with one query per row, see
    `engine.cache.grouping`."""

    query_cost = 1.0
    """The cost that each further query of a row adds to a position, as a fraction of the
    first."""

    def __init__(self, layout: Layout, slots: Slots, rows: Sequence[Row]) -> None:
        super().__init__(layout, slots, rows)
        assert isinstance(slots.pages, GraphPages)
        self._pages = slots.pages
        self._indices: dict[PageFormat, mx.array] = {}
        self._reaches: dict[int | None, list[Reach]] = {}

    # -- writing -----------------------------------------------------------------------

    @cached_property
    def _places(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Pages and places of the new positions, and where their tokens are in the padded batch,
        flat. Without padding that is None, and the others are (batch, 1, width, 1); otherwise they
        are (1, 1, tokens, 1)."""
        size = self._pages.page_tokens
        pages: list[int] = []
        places: list[int] = []
        tokens: list[int] = []
        for number, (row, table) in enumerate(zip(self.rows, self.tables, strict=True)):
            positions = range(row.start, row.end)
            pages += [table[position // size] for position in positions]
            places += [position % size for position in positions]
            tokens += range(number * self.width, number * self.width + row.width)
        is_full = len(tokens) == len(self.rows) * self.width
        shape = (len(self.rows) if is_full else 1, 1, -1, 1)
        where = [mx.array(each, mx.uint32).reshape(shape) for each in (pages, places)]
        return where[0], where[1], None if is_full else mx.array(tokens)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        form = self._pages.formats[layer]
        pages, places, tokens = self._places
        index = self._indices.get(form)
        if index is None:
            index = self._indices[form] = form.index(pages, places)
        if tokens is not None:
            keys, values = (_picked(new, tokens) for new in (keys, values))
        self._pages.write(layer, index, self._words(form, keys, values))

    def _words(self, form: PageFormat, keys: mx.array, values: mx.array) -> mx.array:
        return form.words_of(keys, values)

    # -- attention ---------------------------------------------------------------------

    @cached_property
    def _members(self) -> list[list[int]]:
        """The indices of the rows of each group, which attend in one call."""
        if len(self.rows) == 1:
            return [[0]]
        order = sorted(range(len(self.rows)), key=lambda i: self.rows[i].end)
        token_bytes = max(1, self.layout.layer_value_bytes)
        cost = self.call_cost_tokens / (1 + self.query_cost * (self.width - 1))
        lengths = [self.rows[i].end for i in order]
        runs = split_runs(range(len(order)), lengths, cost)
        return [
            sorted(order[first : min(first + most, run.last + 1)])
            for run in runs
            for most in [max(1, MAX_GATHERED_BYTES // (run.length * token_bytes))]
            for first in range(run.first, run.last + 1, most)
        ]

    @cached_property
    def _order(self) -> tuple[mx.array, mx.array] | None:
        """The rows in the order of groups, and the inverse. None if there is one group."""
        if len(self._members) == 1:
            return None
        order = [i for members in self._members for i in members]
        return mx.array(order), mx.array(sorted(range(len(order)), key=order.__getitem__))

    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        reaches = self._reaches.get(window)
        if reaches is None:
            reaches = self._reaches[window] = self._reach(window)
        order = self._order
        if order is not None:
            query = query[order[0]]
        outputs, first = [], 0
        for reach in reaches:
            keys, values = self._gathered(layer, reach)
            asked = query if order is None else query[first : first + len(reach.pages)]
            first += len(reach.pages)
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    asked, keys, values, scale=scale, mask=reach.mask, sinks=sinks
                )
            )
        return outputs[0] if order is None else mx.concatenate(outputs)[order[1]]

    def _reach(self, window: int | None) -> list[Reach]:
        spans = () if self.given is None else self.given.spans
        return [
            Reach(
                [self.rows[i] for i in members],
                [self.tables[i] for i in members],
                self._pages.page_tokens,
                self.width,
                window,
                spans,
            )
            for members in self._members
        ]

    def _gathered(self, layer: int, reach: Reach) -> tuple[mx.array, mx.array]:
        where = reach.where(self._pages.formats[layer].heads)
        keys, values = self._pages.gather(layer, where, reach.exists)
        return reach.cut(keys), reach.cut(values)


def _picked(new: mx.array, tokens: mx.array) -> mx.array:
    """Return ``new`` (batch, kv_heads, width, dim) of some tokens: (1, kv_heads, tokens, dim)."""
    flat = new.swapaxes(1, 2).flatten(0, 1)[tokens]
    return flat.swapaxes(0, 1)[None]
