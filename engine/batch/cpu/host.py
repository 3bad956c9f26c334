"""Attention over slabs on the CPU, in NumPy.

On Linux, MLX's CPU backend computes exponentials one by one, and everything except matmuls on
one thread. NumPy's exponential is vectorised, and its operations run in parallel when several
threads call them. Attention therefore leaves the graph: queries, keys and values of a layer are
evaluated, and the slabs are read and written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from engine.backend import graphs
from engine.backend.threads import in_parallel, num_threads
from engine.batch.cpu import few_tokens, tiles
from engine.batch.cpu.pieces import (
    How,
    Numbers,
    Piece,
    PrefillPiece,
    RowsPiece,
    attend_singly,
    attend_to_prefill,
    attend_together,
)
from engine.batch.ragged import RaggedBatch, Row
from engine.cache.grouping import split_runs
from engine.cache.host_blocks import host_scales
from engine.cache.layout import Layout
from engine.cache.rounding import Array, Arrays, keep
from engine.cache.slabs import Slab, Slabs

_P = TypeVar("_P", RowsPiece, PrefillPiece)

CALL_COST_TOKENS = 125
"""Fixed cost of one attention call, see `engine.cache.grouping`."""
WORTH_THREADS = 3_000
"""Number of positions attended to in a layer, over all rows, from which threads are worth their
cost."""
SAME_BITS_WORTH_THREADS = 1_500
"""The same if single queries have the bits of a chunk, which takes longer."""
PREFILL_WORTH_THREADS = 20_000
"""The same for chunks: about 100 tokens at position 0 with 3 heads of keys. Threads with short
calls wait for each other to release the interpreter."""
FEW_TOKENS = 17
"""Rows with at most this many tokens, such as those with drafts, attend together."""
MAX_SCORES = 65_536
"""Max number of scores of a head for rows of several tokens to attend together, because all
heads are computed at once."""

_Way = Callable[[_P, tuple[Array, Array], Array, Array, How], None]
"""Writes the attention of a piece."""


class _Stretch(NamedTuple):
    """The rows of a batch in one slab, and their tokens."""

    slab: Slab
    first: int  # number of the first row in the batch
    rows: Sequence[Row]
    tokens: slice  # of the batch
    numbers: Numbers  # the slab's row of each token
    positions: Numbers  # position of each token


class _Work(NamedTuple):
    """The pieces of a layer's attention, the most expensive first, and how many threads share
    them."""

    threads: int
    pieces: list[Piece]


class HostBatch(RaggedBatch):
    """A batch for layers in fp32. All state is evaluated when the model's code returns."""

    writes_in_place = True

    def __init__(self, layout: Layout, slabs: Slabs, rows: Sequence[Row]) -> None:
        super().__init__(layout, slabs, rows)
        self._new: dict[int, tuple[mx.array, mx.array]] = {}
        # For this pass only: MLX would copy a slab that a view still refers to.
        self._views: dict[tuple[Slab, int], Array] = {}
        self._shared: dict[tuple[int, int], _Work] = {}
        few = self.width <= FEW_TOKENS and max(r.width * r.end for r in rows) <= MAX_SCORES
        self.by_token = self.decoding or few
        """Whether keys, values and queries are arrays (tokens, ..., 1, dim), as if each token
        were a row; otherwise there is one array per row."""
        self.first_tokens = [0, *accumulate(row.width for row in rows)]
        self._stretches = [self._stretch(*each) for each in self.by_slab()]

    def pause(self) -> None:
        self._views.clear()

    def _stretch(self, slab: Slab, first: int, rows: Sequence[Row]) -> _Stretch:
        tokens = slice(self.first_tokens[first], self.first_tokens[first + len(rows)])
        if self.decoding:
            numbers, positions = [row.slot.row for row in rows], [row.start for row in rows]
        else:
            numbers = [row.slot.row for row in rows for _ in range(row.width)]
            positions = [position for row in rows for position in range(row.start, row.end)]
        return _Stretch(slab, first, rows, tokens, np.array(numbers), np.array(positions))

    def _array(self, slab: Slab, number: int) -> Array:
        """Return array ``number`` of ``slab``."""
        view = self._views.get((slab, number))
        if view is None:
            view = self._views[slab, number] = slab.host_part(number)
        return view

    def _both(self, layer: int, slab: Slab) -> tuple[Array, Array]:
        """Return keys and values of ``layer``."""
        return self._array(slab, 2 * layer), self._array(slab, 2 * layer + 1)

    def _work(self, heads: int, group: int) -> _Work:
        """Return the work of a layer with ``group`` queries for each of its ``heads`` of keys."""
        key = heads, group * (not self.by_token)
        if key not in self._shared:
            if self.by_token:
                work = _in_order(self._row_pieces(), self._worth_threads)
            else:
                work = _in_order(self._prefill_pieces(heads, group), PREFILL_WORTH_THREADS)
            self._shared[key] = work
        return self._shared[key]

    def _row_pieces(self) -> list[Piece]:
        """Divide rows with few tokens into pieces. Rows of about the same width attend together."""
        work: list[Piece] = []
        parts = num_threads() if sum(row.end for row in self.rows) >= self._worth_threads else 1
        for stretch in self._stretches:
            for members in _by_width(stretch.rows):
                if self._same_bits(stretch.rows[members[0]].width):
                    work += [self._rows_piece(stretch, cut) for cut in _cut(members, parts)]
                    continue
                rows = [stretch.rows[i] for i in members]
                width = max(row.width for row in rows)
                numbers = [row.slot.row for row in rows]
                lengths = [width * row.end for row in rows]
                for run in split_runs(numbers, lengths, CALL_COST_TOKENS):
                    inside = [
                        i
                        for i, number in zip(members, numbers, strict=True)
                        if run.first <= number <= run.last
                    ]
                    scores = (run.last - run.first + 1) * run.length
                    pieces = parts if width == 1 else max(parts, scores // MAX_SCORES + 1)
                    work += [self._rows_piece(stretch, cut) for cut in _cut(inside, pieces)]
        return work

    def _rows_piece(self, stretch: _Stretch, members: Sequence[int]) -> RowsPiece:
        rows = [stretch.rows[i] for i in members]
        numbers = np.arange(max(row.width for row in rows))
        firsts = np.array([self.first_tokens[stretch.first + i] for i in members])
        lasts = np.array([row.width - 1 for row in rows])
        places = np.minimum(numbers, lasts[:, None])
        return RowsPiece(
            stretch.slab,
            rows[0].slot.row,
            rows[-1].slot.row,
            tuple(row.slot.row - rows[0].slot.row for row in rows),
            firsts[:, None] + places,
            np.array([row.start + 1 for row in rows])[:, None] + places,
        )

    def _prefill_pieces(self, heads: int, group: int) -> list[Piece]:
        return [
            PrefillPiece(slab, first + i, row, head, *cut)
            for slab, first, rows in self.by_slab()
            for i, row in enumerate(rows)
            for cut in tiles.cut(row, heads, group)
            for head in range(heads)
        ]

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        self._new[layer] = (keys, values)

    def attend(
        self, layer: int, query: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        new = self._new.pop(layer, None)  # None if this layer has already attended
        mx.eval(query, new or ())
        if new is not None:
            both = [np.asarray(each) for each in new]
            if self.by_token and not self.decoding:
                both = [self._of_tokens(each) for each in both]
            self.store(layer, *both)
        batch, heads, width, _ = query.shape
        kept = self.layout.layers[layer]
        kv_heads, value_dim = kept.kv_heads, kept.value_dim
        asked: Array = np.asarray(query).reshape(batch, kv_heads, heads // kv_heads, width, -1)
        asked = asked * np.float32(scale)
        out: Array = np.zeros((*asked.shape[:-1], value_dim), np.float32)
        extra = None if sinks is None else np.asarray(sinks).reshape(kv_heads, -1, 1, 1)
        if self.by_token and not self.decoding:
            places = self._places
            found = np.empty((len(places[0]), *out.shape[1:3], 1, value_dim), np.float32)
            self.attend_to(layer, self._of_tokens(asked), found, window, extra)
            out[places[0], :, :, places[1]] = found[..., 0, :]
        else:
            self.attend_to(layer, asked, out, window, extra)
        return mx.array(out.reshape(batch, heads, width, value_dim))

    @cached_property
    def _places(self) -> tuple[Numbers, Numbers]:
        """Each token's row in the batch, and its number in that row."""
        widths = [row.width for row in self.rows]
        numbers = np.concatenate([np.arange(width) for width in widths])
        return np.repeat(np.arange(len(widths)), widths), numbers

    def _of_tokens(self, padded: Array) -> Array:
        """Return ``padded`` (batch, ..., width, dim) as (tokens, ..., 1, dim), the format of
        `by_token`."""
        rows, numbers = self._places
        found: Array = np.moveaxis(padded, -2, 1)[rows, numbers][..., None, :]
        return found

    def store(self, layer: int, keys: Arrays, values: Arrays) -> None:
        """Store each row's (kv_heads, width or more, dim) at its position.

        Keys and values are rounded if they are quantized."""
        kinds = self.layout.arrays[2 * layer : 2 * layer + 2]
        kept = keep(keys, values, kinds[0].quantization, kinds[1].quantization)
        for number, (new, scales) in enumerate(kept, 2 * layer):
            for slab, first, rows, tokens, at, positions in self._stretches:
                target = self._array(slab, number)
                marks = None if scales is None else host_scales(slab, number)
                if self.by_token and isinstance(new, np.ndarray):
                    target[at, :, positions] = new[tokens, :, 0]
                    if marks is not None and isinstance(scales, np.ndarray):
                        marks[:, at, :, positions] = scales[tokens, :, :, 0]
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

        A row is (kv_heads, queries of a kv head, width, dim); with `by_token`, each token is a
        row."""
        how = How(window, sinks, softcap)
        attend_to_chunk = attend_to_prefill if graphs.unusable() else tiles.attend_to_prefill

        heads, group = asked[0].shape[:2]
        work = self._work(heads, group)
        pieces = iter(work.pieces)  # shared: the first free thread takes the next piece

        def run() -> None:
            for piece in pieces:
                kept = self._both(layer, piece.slab)
                if isinstance(piece, PrefillPiece):
                    one, found = asked[piece.member], out[piece.member]
                    attend_to_chunk(piece, kept, one, found, how)
                elif isinstance(asked, np.ndarray) and isinstance(out, np.ndarray):
                    attend = self._way_of_rows(piece)
                    attend(piece, kept, asked, out, how)

        in_parallel([run] * work.threads)
        for span in () if self.given is None else self.given.spans:
            in_parallel(
                [
                    partial(self._attend_within, span, layer, head, asked, out, how)
                    for head in range(heads)
                ]
            )

    def _attend_within(
        self, span: tuple[int, int], layer: int, head: int, asked: Arrays, out: Arrays, how: How
    ) -> None:
        """Overwrite the attention of the tokens in a ``span`` of the only row, which attend to
        the whole span. The bits do not depend on how a prompt is divided."""
        ((slab, _, (row,)),) = self.by_slab()
        its = slice(span[0] - row.start, span[1] - row.start)
        keys, values = (each[row.slot.row, head] for each in self._both(layer, slab))
        sinks = None if how.sinks is None else how.sinks[head]
        if self.by_token and isinstance(asked, np.ndarray) and isinstance(out, np.ndarray):
            queries, target = (each[its, head, :, 0].swapaxes(0, 1) for each in (asked, out))
        else:
            queries, target = (each[0][head, :, its] for each in (asked, out))
        tiles.attend(queries, (keys, values), span[0], row.end, how, sinks, target, span)

    @property
    def _worth_threads(self) -> int:
        return SAME_BITS_WORTH_THREADS if self.deterministic else WORTH_THREADS

    def _same_bits(self, width: int) -> bool:
        """Return whether rows with this many tokens attend with the bits of a chunk."""
        return (self.deterministic or width > 1) and not graphs.unusable()

    def _way_of_rows(self, piece: RowsPiece) -> _Way[RowsPiece]:
        if self._same_bits(piece.width):
            return few_tokens.attend
        return attend_singly if piece.width == 1 else attend_together


def _by_width(rows: Sequence[Row]) -> list[list[int]]:
    """Return the indices of ``rows`` in groups whose widths differ by less than a factor of two."""
    kinds: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        kinds.setdefault((row.width - 1).bit_length(), []).append(number)
    return list(kinds.values())


def _cut(items: list[int], parts: int) -> list[list[int]]:
    """Split ``items`` into up to ``parts`` pieces of about the same length."""
    cuts = [len(items) * i // parts for i in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(cuts) if a < b]


def _in_order(work: Sequence[Piece], worth_threads: int) -> _Work:
    """Return ``work`` with the most expensive pieces first.

    One thread does everything if dividing would cost more than it saves."""
    alone = sum(piece.cost for piece in work) < worth_threads
    threads = 1 if alone else min(num_threads(), len(work))
    return _Work(threads, sorted(work, key=lambda piece: -piece.cost))
