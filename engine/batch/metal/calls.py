"""Calls of the kernels over the pages of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from engine.batch.metal import kernel
from engine.batch.metal.kernel import Argument, Kernel, Source
from engine.cache.page_format import WORD_BYTES, PageFormat

LANES = 32
"""Lanes of a SIMD group."""
MAX_QUERIES = 16
"""Rows with more queries attend to gathered pages. The numbers of queries that kernels are compiled
for are powers of two."""
SIMD_GROUPS = 1_000
"""Rows are cut into parts so that about as many SIMD groups work: fewer leave parts of a GPU
idle."""
PART_TOKENS = (64, 1_024)
"""Limits of a part: of shorter parts, joining takes longer."""
JOINING = 4
"""SIMD groups that join the parts of a query."""
FEWEST_ELEMENTS = 8
"""Metal's kernels get shorter arrays in another form, for which MLX compiles them again."""


class Variant(NamedTuple):
    """A way to divide the work of attention. All have the same results, up to rounding."""

    queries: int  # of a key head that a SIMD group computes at once
    lanes: int  # that share a position
    simds: int  # SIMD groups in a threadgroup


class Spans(NamedTuple):
    """The rows of a batch, the same in all layers."""

    table: mx.array  # (rows, pages)
    spans: mx.array  # (rows, 2) and padding, flat: the first query and the end of each row
    rows: int
    longest: int  # the end of the longest row

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]]) -> Spans:
        """``rows`` are the start and the end of each."""
        flat = [each for row in rows for each in row]
        return cls(page_table(tables), padded_ints(flat), len(rows), max(end for _, end in rows))


def can_round(form: PageFormat) -> bool:
    """Return whether kernels can round to the codes in pages of this form."""
    return all(
        kind.quantization is not None and kind.quantization.is_symmetric
        for kind in (form.keys, form.values)
    )


def can_attend(form: PageFormat) -> bool:
    """Return whether kernels can read pages of this form."""
    schemes = form.keys.quantization, form.values.quantization
    is_plain = schemes == (None, None)
    dims = form.keys.dim, form.values.dim
    return (is_plain or can_round(form)) and all(dim and dim % WORD_BYTES == 0 for dim in dims)


def lanes_of(form: PageFormat) -> list[int]:
    """Return how many lanes may share a position: the number with about 8 elements for each, and
    half as many. The first is the larger."""
    dims = form.keys.dim, form.values.dim
    fitting = [
        lanes
        for lanes in (1, 2, 4, 8, 16, 32)
        if all(dim % (4 * lanes) == 0 and (lanes == 1 or dim // lanes >= 8) for dim in dims)
    ]
    return fitting[: -3 if len(fitting) > 2 else None : -1]


def variants_of(form: PageFormat, query_heads: int, width: int) -> list[Variant]:
    """Return the variants worth trying for ``width`` queries of each row."""
    queries = query_heads // form.heads * padded_width(width)
    at_once = {min(count, queries) for count in (2, 4, 8)}
    return [
        Variant(count, lanes, simds)
        for lanes in lanes_of(form)
        for count in sorted(at_once, reverse=True)
        for simds in (4, 1)
    ]


def padded_width(width: int) -> int:
    """Return the number of queries that kernels compute for rows with ``width``."""
    return 1 << (width - 1).bit_length()


class PageKernels:
    """The kernels for pages of one form."""

    def __init__(self, form: PageFormat) -> None:
        self._form = form
        keys, values = form.keys, form.values
        groups = [
            1 if kind.quantization is None else kind.quantization.group_size
            for kind in (keys, values)
        ]
        self._dims: list[Argument] = [
            ("T", keys.dtype),
            ("DK", keys.dim),
            ("DV", values.dim),
            ("KG", groups[0]),
            ("VG", groups[1]),
        ]
        size = 1 if keys.quantization is not None else int(keys.dtype.size)
        self._page: list[Argument] = [
            *self._dims,
            ("P", form.page_tokens),
            ("SIZE", size),
            ("HEADS", form.heads),
        ]

    def round(self, keys: mx.array, values: mx.array) -> mx.array:
        """Return the words of new ``keys`` and ``values`` (..., dim), as `PageFormat.words_of`."""
        count = keys.size // keys.shape[-1]
        (words,) = _kernel(kernel.ROUND)(
            inputs=[keys, values],
            template=self._dims,
            grid=(LANES * count, 1, 1),
            threadgroup=(LANES, 1, 1),
            output_shapes=[(*keys.shape[:-1], self._form.token_words)],
            output_dtypes=[mx.uint32],
        )
        return words

    def gather(
        self, pool: mx.array, table: mx.array, ends: mx.array, first: int, count: int
    ) -> tuple[mx.array, mx.array]:
        """Return keys and values (rows, kv_heads, count, dim) of the pages in ``table`` (rows or
        more, pages), from position ``first`` on, and zeros from the ``ends`` of the rows on."""
        form, rows = self._form, table.shape[0]
        dims = form.keys.dim, form.values.dim
        words = max(dims) // 4
        keys, values = _kernel(kernel.GATHER)(
            inputs=[pool, table, ends, _ints(count, first)],
            template=self._page,
            grid=(words, count, rows * form.heads),
            threadgroup=(min(LANES, words), min(4, count), 1),
            output_shapes=[(rows, form.heads, count, dim) for dim in dims],
            output_dtypes=[form.keys.dtype] * 2,
        )
        return keys, values

    def attend(
        self,
        pool: mx.array,
        query: mx.array,
        rows: Spans,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        variant: Variant,
    ) -> mx.array:
        """Return the attention of ``query`` (rows, heads, width, dim) over each row's pages."""
        form, (heads, width) = self._form, query.shape[1:3]
        count, value_dim = padded_width(width), form.values.dim
        if count > width:
            query = mx.pad(query, [(0, 0), (0, 0), (0, count - width), (0, 0)])
        at_once = min(variant.queries, heads // form.heads * count)
        chunks = form.heads * -(-heads // form.heads * count // at_once)
        seen = min(rows.longest, window + count + form.page_tokens) if window else rows.longest
        parts, part_tokens = _parts(seen, rows.rows * chunks)
        simds = min(variant.simds, parts)
        queries = rows.rows * heads * count
        sums, tops = _kernel(kernel.ATTEND)(
            inputs=[
                query,
                pool,
                rows.table,
                rows.spans,
                _ints(parts, window or 0, part_tokens),
                _floats(scale),
            ],
            template=[
                *self._page,
                ("G", heads // form.heads),
                ("Q", count),
                ("H", at_once),
                ("L", variant.lanes),
            ],
            grid=(LANES * chunks, rows.rows, -(-parts // simds) * simds),
            threadgroup=(LANES, 1, simds),
            output_shapes=[(queries, parts, value_dim), (queries, parts, 2)],
            output_dtypes=[mx.float32, mx.float32],
        )
        (out,) = _kernel(kernel.JOIN)(
            inputs=[sums, tops, _floats(0.0) if sinks is None else sinks],
            template=[
                ("T", query.dtype),
                ("S", JOINING),
                ("DV", value_dim),
                ("Q", count),
                ("QUERY_HEADS", heads),
                ("SINKS", sinks is not None),
            ],
            grid=(LANES * queries, JOINING, 1),
            threadgroup=(LANES, JOINING, 1),
            output_shapes=[(rows.rows, heads, count, value_dim)],
            output_dtypes=[query.dtype],
        )
        return out if count == width else out[:, :, :width]


@cache
def page_kernels(form: PageFormat) -> PageKernels:
    """Return the kernels for pages of this form, the same for all batches."""
    return PageKernels(form)


def page_table(tables: Sequence[Sequence[int]]) -> mx.array:
    """Return ``tables`` as one array (rows, pages). A row has a page of its own in place of those
    that it lacks."""
    return _page_table(tuple(map(tuple, tables)))


@lru_cache(maxsize=16)  # a table grows every `page_tokens` steps
def _page_table(tables: tuple[tuple[int, ...], ...]) -> mx.array:
    longest = max(FEWEST_ELEMENTS, *(len(table) for table in tables))
    found = np.empty((len(tables), longest), np.uint32)
    for row, table in zip(found, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[-1]
    return mx.array(found)


def padded_ints(numbers: Sequence[int]) -> mx.array:
    """Return ``numbers`` as kernels take them, such as the ends of rows."""
    missing = FEWEST_ELEMENTS - len(numbers)
    return mx.array([*numbers, *[0] * missing], mx.int32)


@lru_cache(maxsize=256)
def _ints(*values: int) -> mx.array:
    return mx.array(values, mx.int32)


@lru_cache(maxsize=64)
def _floats(*values: float) -> mx.array:
    return mx.array(values, mx.float32)


def _parts(tokens: int, others: int) -> tuple[int, int]:
    """Return the number of parts of rows with so many ``tokens`` at most, and the tokens of each.
    So many SIMD groups work on other rows and heads."""
    low, high = PART_TOKENS
    wanted = tokens * others // SIMD_GROUPS
    part = min(max(low, 1 << max(0, wanted - 1).bit_length()), high)
    return max(1, -(-tokens // part)), part


@cache
def _kernel(source: Source) -> Kernel:
    return kernel.make(source)
