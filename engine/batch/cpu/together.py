"""Attention of decoding rows in two calls of a BLAS, one for all scores and one for all sums.

NumPy multiplies head by head. For a few queries and many keys OpenBLAS then takes several times
as long as reading the keys does. Some libraries have ``cblas_sgemm_batch``, which computes any
number of products of different sizes, shared between its threads. So each row attends to its
own positions only, in the time that these take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.backend.blas import AS_IT_IS, ROW_MAJOR, TRANSPOSED
from engine.batch.ragged import Row
from engine.cache.grouping import split_runs
from engine.cache.layout import AttentionLayout, Layout
from engine.cache.rounding import Array
from engine.cache.slabs import Slab

Pointers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Gemm = Callable[..., None]
"""The function that `blas.cblas_sgemm_batch` returns."""

CALL_COST_TOKENS = 125
"""Fixed cost of a softmax, see `engine.cache.grouping`."""


class Together:
    """The rows of a pass, one query each. ``by_slab`` is `RaggedBatch.by_slab`."""

    def __init__(
        self, gemm: Gemm, layout: Layout, by_slab: Sequence[tuple[Slab, int, Sequence[Row]]]
    ) -> None:
        self._gemm = gemm
        self._layout = layout
        self._slabs = [slab for slab, _, _ in by_slab]
        self._owners = np.repeat(np.arange(len(by_slab)), [len(rows) for _, _, rows in by_slab])
        self._numbers = np.array([row.slot.row for _, _, rows in by_slab for row in rows])
        self._ends = np.array([row.end for _, _, rows in by_slab for row in rows])
        self._tables: dict[tuple[AttentionLayout, int | None], _Table] = {}

    def attend_to(self, layer: int, asked: Array, out: Array, window: int | None) -> None:
        """Write the attention of the scaled queries ``asked`` to the same places of ``out``.

        Both are (rows, kv_heads, queries of a kv head, 1, dim). ``out`` is contiguous."""
        kept = self._layout.layers[layer]
        table = self._tables.get((kept, window))
        if table is None:
            table = _Table(self._ends, asked.shape[2], kept, window)
            self._tables[kept, window] = table
        queries = np.ascontiguousarray(asked)
        table.scores_of(
            self._gemm, _addresses(queries), self._heads(2 * layer, table.starts), table.places
        )
        totals = np.empty((*asked.shape[:3], 1, 1), np.float32)
        for members, lengths, scores in table.groups:
            for one, end in zip(scores, lengths, strict=True):
                one[..., end:] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            totals[members] = scores.sum(axis=-1)[..., None, None]
        table.sums_of(
            self._gemm, table.places, self._heads(2 * layer + 1, table.starts), _addresses(out)
        )
        out /= totals

    def _heads(self, number: int, starts: Pointers) -> Pointers:
        """Return the address of position ``starts`` of each head of each row in a slab's array."""
        arrays = [np.asarray(slab.arrays[number]) for slab in self._slabs]
        bases = np.array([[array.ctypes.data, *array.strides[:3]] for array in arrays])
        base, row, head, position = bases[self._owners].T
        first = base + self._numbers * row + starts * position
        heads: Pointers = first[:, None] + np.arange(arrays[0].shape[1]) * head[:, None]
        return heads


class _Group(NamedTuple):
    """Rows whose softmax is computed together."""

    members: list[int]
    lengths: list[int]
    scores: Array  # (members, kv_heads, queries of a kv head, the longest of ``lengths``)


class _Table:
    """The places and numbers of scores, shared by all layers of a pass with the same layout."""

    def __init__(
        self, ends: Pointers, queries: int, kept: AttentionLayout, window: int | None
    ) -> None:
        self.starts = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        lengths = ends - self.starts
        order = np.argsort(lengths, kind="stable").tolist()
        self.groups: list[_Group] = []
        self.places = np.empty((len(ends), kept.kv_heads), np.int64)
        strides = np.empty_like(ends)
        for run in split_runs(range(len(order)), lengths[order].tolist(), CALL_COST_TOKENS):
            members = order[run.first : run.last + 1]
            shape = (len(members), kept.kv_heads, queries, run.length)
            group = _Group(members, lengths[members].tolist(), np.empty(shape, np.float32))
            self.places[members] = _addresses(group.scores)
            strides[members] = run.length
            self.groups.append(group)
        heads = kept.kv_heads
        self.scores_of = _Products(
            heads, queries, lengths, kept.key_dim, kept.key_dim, kept.key_dim, strides, TRANSPOSED
        )
        self.sums_of = _Products(
            heads, queries, kept.value_dim, lengths, strides, kept.value_dim, kept.value_dim
        )


class _Products:
    """Products left @ right, or @ right.T, of (m, k) and (k, n) matrices with these strides.

    There is a group of ``heads`` products for each element of the arguments that are arrays."""

    def __init__(
        self,
        heads: int,
        m: int,
        n: Any,
        k: Any,
        left_stride: Any,
        right_stride: Any,
        out_stride: Any,
        right_order: int = AS_IT_IS,
    ) -> None:
        self._count = np.broadcast(n, k).size
        integers = (AS_IT_IS, right_order, m, n, k, left_stride, right_stride, out_stride, heads)
        self._table = np.empty((len(integers), self._count), np.int32)
        for row, value in zip(self._table, integers, strict=True):
            row[:] = value
        self._factors = np.array([[1.0] * self._count, [0.0] * self._count], np.float32)

    def __call__(self, gemm: Gemm, left: Pointers, right: Pointers, out: Pointers) -> None:
        left_order, right_order, m, n, k, *strides, sizes = _rows(self._table)
        one, zero = _rows(self._factors)
        gemm(
            *(ROW_MAJOR, left_order, right_order, m, n, k),
            *(one, left.ctypes.data, strides[0], right.ctypes.data, strides[1]),
            *(zero, out.ctypes.data, strides[2], self._count, sizes),
        )


def _addresses(array: Array) -> Pointers:
    """Return the address of each (row, head)'s matrix in the contiguous ``array`` (rows, heads,
    ...)."""
    rows, heads = array.shape[:2]
    size = array[0, 0].nbytes
    addresses: Pointers = array.ctypes.data + np.arange(rows * heads).reshape(rows, heads) * size
    return addresses


def _rows(table: np.ndarray[Any, Any]) -> list[int]:
    return [table.ctypes.data + number * table.strides[0] for number in range(len(table))]
