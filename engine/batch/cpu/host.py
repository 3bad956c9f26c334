"""Attention over slabs on the CPU, in NumPy.

On Linux MLX's CPU computes exponentials one by one and everything but matmuls on one
thread. NumPy's exponential is vectorised, and its operations run in parallel when several
threads call them. So attention leaves the graph: queries, keys and values of a layer are
evaluated, and the slabs are read and written in place in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple

import mlx.core as mx
import numpy as np

from engine.backend.threads import in_parallel, num_threads
from engine.batch.cpu import tiles
from engine.batch.cpu.tiles import Span
from engine.batch.ragged import RaggedBatch, Row
from engine.cache.grouping import split_runs
from engine.cache.host_blocks import host_scales
from engine.cache.layout import Layout
from engine.cache.rounding import Array, Arrays, keep
from engine.cache.slabs import Slab, Slabs

CALL_COST_TOKENS = 125
"""Fixed cost of one attention call, see `engine.cache.grouping`."""
WORTH_THREADS = 3_000
"""Positions attended to in a layer, over all rows, from which threads are worth their cost."""
FEW_QUERIES = 3
"""Queries of a head of keys up to which products with vectors, without OpenBLAS's packing, take
half as long as products of matrices."""
QUERIES_AT_ONCE = 64
"""So few that scores stay in the processor's cache, and little above the diagonal is computed."""
ABOVE_DIAGONAL: Array = np.triu(np.full((QUERIES_AT_ONCE, QUERIES_AT_ONCE), -np.inf, np.float32), 1)
"""Minus infinity if a key comes after its query, else 0. One table for all widths: a table for
each width would take more than a hundred kilobytes that the ledger does not count."""


@dataclass(frozen=True)
class _Decode:
    """Rows ``first`` to ``last`` (inclusive) of a slab."""

    slab: Slab
    first: int
    last: int
    members: slice  # of the rows of the batch
    places: tuple[int, ...]  # of each member among the rows of the slab
    lengths: tuple[int, ...]  # positions of each member

    @cached_property
    def length(self) -> int:
        return max(self.lengths)

    @property
    def cost(self) -> int:
        return (self.last - self.first + 1) * self.length


@dataclass(frozen=True)
class _Prefill:
    """Queries ``first`` to ``last`` (exclusive, positions in the input) of one row."""

    slab: Slab
    member: int
    row: Row
    first: int
    last: int

    @property
    def cost(self) -> int:
        return (self.last - self.first) * (self.row.start + self.last)


class _How(NamedTuple):
    """How a layer attends, beside the lengths of rows."""

    window: int | None
    sinks: Array | None
    """(kv_heads, queries of a kv head, 1, 1): other scores, with a share and no value."""
    softcap: float | None


class HostBatch(RaggedBatch):
    """A batch for layers in float32. All state is evaluated when the model's code returns."""

    writes_in_place = True
    deterministic: ClassVar[bool] = False
    """Whether attention is that of `engine.batch.cpu.tiles`."""

    def __init__(self, layout: Layout, slabs: Slabs, rows: Sequence[Row]) -> None:
        super().__init__(layout, slabs, rows)
        self._new: dict[int, tuple[mx.array, mx.array]] = {}
        # For this pass only: MLX would copy a slab that a view still refers to.
        self._views: dict[Slab, list[Array]] = {}
        self._spans: dict[tuple[int, int, int | None], Span] = {}
        self._stretches = [
            (
                slab,
                first,
                rows,
                np.array([row.slot.row for row in rows]),
                np.array([row.start for row in rows]),
            )
            for slab, first, rows in self.by_slab()
        ]

    def _array(self, slab: Slab, number: int) -> Array:
        """Return array ``number`` of ``slab``."""
        if slab not in self._views:
            self._views[slab] = [
                slab.host_part(number) for number in range(len(self.layout.arrays))
            ]
        return self._views[slab][number]

    def _both(self, layer: int, slab: Slab) -> tuple[Array, Array]:
        """Return keys and values of ``layer``."""
        return self._array(slab, 2 * layer), self._array(slab, 2 * layer + 1)

    @cached_property
    def _shares(self) -> list[list[_Decode | _Prefill]]:
        """The work of each thread, if NumPy computes attention."""
        by_runs = self.decoding and not self.deterministic
        return _share(self._decodes() if by_runs else self._prefills())

    def _decodes(self) -> list[_Decode]:
        work = []
        parts = num_threads() if sum(row.end for row in self.rows) >= WORTH_THREADS else 1
        for slab, first, rows in self.by_slab():
            numbers = [row.slot.row for row in rows]
            for run in split_runs(numbers, [row.end for row in rows], CALL_COST_TOKENS):
                inside = [i for i, n in enumerate(numbers) if run.first <= n <= run.last]
                for piece in _cut(inside, parts):
                    chosen = [rows[i] for i in piece]
                    work.append(
                        _Decode(
                            slab,
                            chosen[0].slot.row,
                            chosen[-1].slot.row,
                            slice(first + piece[0], first + piece[-1] + 1),
                            tuple(row.slot.row - chosen[0].slot.row for row in chosen),
                            tuple(row.end for row in chosen),
                        )
                    )
        return work

    def _prefills(self) -> list[_Prefill]:
        return [
            _Prefill(slab, first + i, row, start, min(start + QUERIES_AT_ONCE, row.width))
            for slab, first, rows in self.by_slab()
            for i, row in enumerate(rows)
            for start in range(0, row.width, QUERIES_AT_ONCE)
        ]

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._new[layer] = (keys, values)

    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        new = self._new.pop(layer, None)  # None if the layer was attended to before
        mx.eval(query, new or ())
        if new is not None:
            self.store(layer, np.asarray(new[0]), np.asarray(new[1]))
        batch, heads, width, _ = query.shape
        kept = self.layout.layers[layer]
        kv_heads, value_dim = kept.kv_heads, kept.value_dim
        asked: Array = np.asarray(query).reshape(batch, kv_heads, heads // kv_heads, width, -1)
        asked = asked * np.float32(scale)
        out = np.zeros((*asked.shape[:-1], value_dim), np.float32)
        extra = None if sinks is None else np.asarray(sinks).reshape(kv_heads, -1, 1, 1)
        self.attend_to(layer, asked, out, window, extra)
        return mx.array(out.reshape(batch, heads, width, value_dim))

    def store(self, layer: int, keys: Arrays, values: Arrays) -> None:
        """Write each row's (kv_heads, at least its width, dim) at its position.

        Keys and values are rounded if they are quantized."""
        kinds = self.layout.arrays[2 * layer : 2 * layer + 2]
        kept = keep(keys, values, kinds[0].quantization, kinds[1].quantization)
        for number, (new, scales) in enumerate(kept, 2 * layer):
            for slab, first, rows, numbers, starts in self._stretches:
                target = self._array(slab, number)
                marks = None if scales is None else host_scales(slab, number)
                if self.decoding and isinstance(new, np.ndarray):
                    last = first + len(rows)
                    target[numbers, :, starts] = new[first:last, :, 0]
                    if marks is not None and isinstance(scales, np.ndarray):
                        marks[:, numbers, :, starts] = scales[first:last, :, :, 0]
                    continue
                for i, row in enumerate(rows, first):
                    target[row.slot.row, :, row.start : row.end] = new[i][:, : row.width]
                    if marks is not None and scales is not None:
                        place = marks[:, row.slot.row, :, row.start : row.end]
                        place[...] = scales[i][:, :, : row.width]

    def attend_to(
        self,
        layer: int,
        asked: Arrays,
        out: Arrays,
        window: int | None,
        sinks: Array | None = None,
        softcap: float | None = None,
    ) -> None:
        """Write the attention of each row's scaled queries to the same places of ``out``.

        A row is (kv_heads, queries of a kv head, width, dim). Decoding rows are one array."""
        how = _How(window, sinks, softcap)

        def share(pieces: Sequence[_Decode | _Prefill]) -> Callable[[], None]:
            def run() -> None:
                for piece in pieces:
                    if isinstance(piece, _Prefill) and self.deterministic:
                        self._in_tiles(piece, layer, asked, out, how)
                    elif isinstance(piece, _Prefill):
                        _prefill(piece, self._both(layer, piece.slab), asked, out, how)
                    elif isinstance(asked, np.ndarray) and isinstance(out, np.ndarray):
                        _decode(piece, self._both(layer, piece.slab), asked, out, how)

            return run

        in_parallel([share(pieces) for pieces in self._shares])

    def _in_tiles(self, piece: _Prefill, layer: int, asked: Arrays, out: Arrays, how: _How) -> None:
        """Attend like `_prefill`, in an order that depends on nothing but positions."""
        row, place = piece.row, (piece.member, piece.first, how.window)
        if place not in self._spans:
            self._spans[place] = Span(row.start + piece.first, row.start + piece.last, how.window)
        keys, values = (array[row.slot.row] for array in self._both(layer, piece.slab))
        for head in range(len(keys)):
            queries = asked[piece.member][head, :, piece.first : piece.last]
            out[piece.member][head, :, piece.first : piece.last] = tiles.attend(
                queries, keys[head], values[head], self._spans[place], how.softcap
            )


def _decode(piece: _Decode, kept: tuple[Array, Array], asked: Array, out: Array, how: _How) -> None:
    low = 0 if how.window is None else max(0, min(piece.lengths) - how.window)
    keys, values = (array[piece.first : piece.last + 1, :, low : piece.length] for array in kept)
    queries, found = asked[piece.members, :, :, 0], out[piece.members, :, :, 0]
    gaps = len(keys) != len(queries)
    if gaps:  # rows in between attend too, but their output is not read
        spread = np.zeros((len(keys), *queries.shape[1:]), np.float32)
        spread[list(piece.places)] = queries
        queries = spread
    few = queries.shape[2] <= FEW_QUERIES
    if few:
        scores: Array = np.matvec(keys[:, :, None], queries)
    else:  # many rows by few: OpenBLAS takes half as long for it as for few by many
        scores = np.ascontiguousarray((keys @ queries.swapaxes(2, 3)).swapaxes(2, 3))
    _cap(scores, how.softcap)
    for place, length in zip(piece.places, piece.lengths, strict=True):
        if length < piece.length:
            scores[place, :, :, length - low :] = -np.inf
        if how.window is not None and length - how.window > low:
            scores[place, :, :, : length - how.window - low] = -np.inf
    total = _softmax(scores, None if how.sinks is None else how.sinks[..., 0])
    result: Array = np.vecmat(scores, values[:, :, None]) if few else scores @ values
    if gaps:
        result, total = result[list(piece.places)], total[list(piece.places)]
    np.divide(result, total, out=found)


def _prefill(
    piece: _Prefill, kept: tuple[Array, Array], asked: Arrays, out: Arrays, how: _How
) -> None:
    row, count, window = piece.row, piece.last - piece.first, how.window
    start, end = row.start + piece.first, row.start + piece.last
    low = 0 if window is None else max(0, start - window + 1)
    keys, values = (array[row.slot.row, :, low:end] for array in kept)
    for head in range(keys.shape[0]):
        queries = asked[piece.member][head, :, piece.first : piece.last]
        scores = (queries.reshape(-1, queries.shape[-1]) @ keys[head].T).reshape(
            -1, count, end - low
        )
        _cap(scores, how.softcap)
        scores[:, :, start - low :] += ABOVE_DIAGONAL[:count, :count]
        if window is not None and end - low > window:
            scores += _outside(start - low, count, end - low, window)
        total = _softmax(scores, None if how.sinks is None else how.sinks[head])
        result = scores @ values[head]
        result /= total
        out[piece.member][head, :, piece.first : piece.last] = result


def _cap(scores: Array, softcap: float | None) -> None:
    """Bound ``scores`` smoothly, in place."""
    if softcap is not None:
        scores /= softcap
        np.tanh(scores, out=scores)
        scores *= softcap


def _softmax(scores: Array, sinks: Array | None) -> Array:
    """Make shares of ``scores`` in place, and return by what they have to be divided.

    ``sinks`` is another score for each row of ``scores``, which has a share and no value."""
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    scores -= highest
    np.exp(scores, out=scores)
    total: Array = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - highest)
    return total


def _outside(first: int, count: int, keys: int, window: int) -> Array:
    """Return (count, keys): minus infinity if a key is ``window`` or more before its query."""
    queries = np.arange(first, first + count)[:, None]
    far = np.arange(keys)[None] <= queries - window
    return np.where(far, np.float32(-np.inf), np.float32(0))


def _cut(items: list[int], parts: int) -> list[list[int]]:
    """Split ``items`` into up to ``parts`` pieces of about the same length."""
    cuts = [len(items) * i // parts for i in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(cuts) if a < b]


def _share(work: Sequence[_Decode | _Prefill]) -> list[list[_Decode | _Prefill]]:
    """Divide ``work`` between the threads, the most expensive piece first.

    It stays together if dividing would cost more than it saves."""
    if sum(piece.cost for piece in work) < WORTH_THREADS:
        return [list(work)]
    shares: list[list[_Decode | _Prefill]] = [[] for _ in range(num_threads())]
    loads = [0] * len(shares)
    for piece in sorted(work, key=lambda piece: -piece.cost):
        least = loads.index(min(loads))
        shares[least].append(piece)
        loads[least] += piece.cost
    return [share for share in shares if share]
