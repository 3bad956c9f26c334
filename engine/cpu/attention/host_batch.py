"""Attention over pages on the CPU, in NumPy.

On Linux, MLX's CPU backend computes exponentials one by one, and everything except matmuls on
one thread. NumPy's exponential is vectorised, and its operations run in parallel when several
threads call them. Attention therefore leaves the graph: queries, keys and values of a layer are
evaluated, and pages are read and written in place.

Attention reads the values of neighbouring positions one after the other. Some slots have them
unpacked (`engine.cpu.pages.unpacked`). Those of other rows are read from their pages in each layer
(`engine.cpu.attention.scratch`). The bits are the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from math import lcm
from typing import NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from engine.backend.threads import in_parallel, num_threads
from engine.batch.ragged import RaggedBatch, Row
from engine.cache.grouping import split_runs
from engine.cache.layout import Layout
from engine.cache.slots import Slots
from engine.cpu.attention import few_tokens, tiles
from engine.cpu.attention.pieces import (
    How,
    Kept,
    Piece,
    PrefillPiece,
    RowsPiece,
    attend_singly,
    attend_to_prefill,
    attend_together,
)
from engine.cpu.attention.scratch import ScratchRows
from engine.cpu.attention.tiles import FEWEST, tiled
from engine.cpu.onnx import graphs
from engine.cpu.pages.host_pages import HostPages, Numbers, Scratch, TokenPlaces
from engine.cpu.pages.rounding import Array, Arrays
from engine.cpu.pages.unpacked import Began, UnpackedRows

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
MAX_SCRATCH_BYTES = 32 << 20
"""Max bytes of the values of a layer that are read at once for chunks, unless one row has more."""
LANE_BYTES = 2 << 20
"""The same for rows with few tokens in a lane: about a core's cache."""
MAX_SCORES = 65_536
"""Max number of scores of a head for rows of several tokens to attend together, because all
heads are computed at once."""

_Way = Callable[[_P, Kept, Array, Array, How], None]
"""Writes the attention of a piece."""


class _Work(NamedTuple):
    """The pieces of a layer's attention, the most expensive first, and how many threads share
    them."""

    threads: int
    pieces: list[Piece]


@dataclass(frozen=True)
class _Stretch:
    """Rows of a batch that attend together, since their values are in the same arrays."""

    memory: UnpackedRows | Scratch
    members: list[int]  # indices in the batch
    places: list[int]  # the row of each in the arrays, ascending
    rows: ScratchRows | None = None  # in a scratch
    works: dict[tuple[int, int], _Work] = field(default_factory=dict)


class HostBatch(RaggedBatch):
    """A batch for layers in fp32. All state is evaluated when the model's code returns."""

    pages_class = HostPages
    gathered_layers = 1

    def __init__(self, layout: Layout, slots: Slots, rows: Sequence[Row]) -> None:
        super().__init__(layout, slots, rows)
        assert isinstance(slots.pages, HostPages)
        self._pages = slots.pages
        self._new: dict[int, tuple[mx.array, mx.array]] = {}
        few = self.width <= FEW_TOKENS and max(r.width * r.end for r in rows) <= MAX_SCORES
        self.by_token = self.decoding or few
        """Whether keys, values and queries are arrays (tokens, ..., 1, dim), as if each token
        were a row; otherwise there is one array per row."""
        self.first_tokens = [0, *accumulate(row.width for row in rows)]

    @classmethod
    def gathered_rows(cls) -> int:
        return num_threads()  # each reads a row, or a few short ones

    @classmethod
    def attends_both_ways(cls) -> bool:
        return not graphs.unusable()

    def resume(self) -> None:
        """Look again which slots are unpacked. A pass counts once for that, in however many
        stretches it is computed."""
        for name in ("_new_unpacked", "_stretches", "_lanes"):
            vars(self).pop(name, None)
        if "_began" in vars(self):
            self._began = self._pages.unpacked.going_on(self._began, self.rows)

    @cached_property
    def _new_tokens(self) -> TokenPlaces:
        """Where the new tokens go, with `by_token`."""
        size, pages, indices = self._pages.page_tokens, [], []
        for row, table in zip(self.rows, self.tables, strict=True):
            for position in range(row.start, row.end):
                pages.append(table[position // size])
                indices.append(position % size)
        return TokenPlaces(np.array(pages), np.array(indices))

    @cached_property
    def _began(self) -> Began:
        return self._pages.unpacked.begin(self.rows)

    @property
    def _unpacked(self) -> list[int]:
        """The indices of the rows that are unpacked."""
        return self._began.members

    @cached_property
    def _new_unpacked(self) -> tuple[slice | Numbers, Numbers, Numbers]:
        """The tokens of unpacked slots, with `by_token`: indices in the batch, slots, positions."""
        rows = [self.rows[i] for i in self._unpacked]
        if len(rows) == len(self.rows):
            tokens: slice | Numbers = slice(None)
        else:
            cuts = [(self.first_tokens[i], self.first_tokens[i + 1]) for i in self._unpacked]
            tokens = np.concatenate([np.arange(*cut) for cut in cuts])
        slots = np.repeat([row.slot for row in rows], [row.width for row in rows])
        return tokens, slots, np.concatenate([np.arange(row.start, row.end) for row in rows])

    @cached_property
    def _stretches(self) -> list[_Stretch]:
        """The rows whose pieces all threads share: those that are unpacked, and chunks."""
        found, rest = [], set(range(len(self.rows)))
        if self._unpacked:
            slots = [self.rows[i].slot for i in self._unpacked]
            found.append(_Stretch(self._pages.unpacked, self._unpacked, slots))
            rest -= set(self._unpacked)
        if not self.by_token:
            scratch = self._pages.scratch(0)
            found += [self._read(some, scratch) for some in self._cut(rest, MAX_SCRATCH_BYTES)]
        return found

    @cached_property
    def _lanes(self) -> list[list[_Stretch]]:
        """The rows with few tokens that are not unpacked, for each thread in a scratch of its own.
        It reads a few at a time, and they attend while their values are in the core's cache. Of a
        single row, each thread has some heads."""
        rest = [i for i in range(len(self.rows)) if i not in self._unpacked]
        if not rest or not self.by_token:
            return []
        if len(rest) == 1 and self.given is None:
            row, pages = self.rows[rest[0]], self._pages
            parts = min(num_threads(), *(each.kv_heads for each in self.layout.layers))
            if row.width * row.end < self._worth_threads:
                parts = 1
            shares = [self._read(rest, pages.scratch(0), (n, parts)) for n in range(parts)]
            # Arguments of calls are kept for each memory, and used by one thread at a time.
            return [[replace(each, memory=pages.scratch(n))] for n, each in enumerate(shares)]
        worth = sum(self.rows[i].end for i in rest) >= self._worth_threads
        lanes: list[list[int]] = [[] for _ in range(num_threads() if worth else 1)]
        for i in sorted(rest, key=lambda i: -self.rows[i].end):
            min(lanes, key=lambda lane: sum(self.rows[i].end for i in lane)).append(i)
        return [
            [self._read(some, self._pages.scratch(lane)) for some in self._cut(members, LANE_BYTES)]
            for lane, members in enumerate(lanes)
            if members
        ]

    def _cut(self, members: Collection[int], most_bytes: int) -> list[list[int]]:
        """Divide rows into groups whose values in a layer take up to ``most_bytes``, or of one row.
        Rows of about the same width and length are neighbours."""
        groups: list[list[int]] = []
        for i in sorted(members, key=lambda i: (_width_class(self.rows[i]), self.rows[i].end)):
            size = self._capacity(i) * self.layout.layer_value_bytes  # of the longest so far
            if not groups or (len(groups[-1]) + 1) * size > most_bytes:
                groups.append([])
            groups[-1].append(i)
        return groups

    def _capacity(self, i: int) -> int:
        unit = lcm(FEWEST, self._pages.page_tokens)
        return -(-self.rows[i].end // unit) * unit

    def _read(
        self, members: list[int], scratch: Scratch, part: tuple[int, int] = (0, 1)
    ) -> _Stretch:
        tables, ends = [self.tables[i] for i in members], [self.rows[i].end for i in members]
        capacity = max(self._capacity(i) for i in members)
        rows = ScratchRows(self._pages, scratch, tables, ends, capacity, part)
        return _Stretch(scratch, members, list(range(len(members))), rows)

    def _low(self, layer: int, stretch: _Stretch) -> int:
        """Return the first position that rows of a stretch read in a layer."""
        its = self.layout.layers[layer]
        start = min(self.rows[i].start for i in stretch.members)
        return tiled(start, start + 1, its.window, its.value_dim)[0]

    def _work(self, stretch: _Stretch, heads: int, group: int) -> _Work:
        """Return the work of a stretch in a layer with ``group`` queries for each of its ``heads``
        of keys."""
        key = heads, group * (not self.by_token)
        if key not in stretch.works:
            if self.by_token:
                work = _in_order(self._row_pieces(stretch), self._worth_threads)
            else:
                pieces = self._prefill_pieces(stretch, heads, group)
                work = _in_order(pieces, PREFILL_WORTH_THREADS)
            stretch.works[key] = work
        return stretch.works[key]

    def _row_pieces(self, stretch: _Stretch) -> list[Piece]:
        """Divide rows with few tokens into pieces. Rows of about the same width attend together."""
        work: list[Piece] = []
        every = [self.rows[i] for i in stretch.members]
        worth = stretch.rows is None and sum(row.end for row in every) >= self._worth_threads
        parts = num_threads() if worth else 1
        for members in _by_width(every):
            if self._same_bits(every[members[0]].width):
                work += [self._rows_piece(stretch, cut) for cut in _cut(members, parts)]
                continue
            width = max(every[i].width for i in members)
            places = [stretch.places[i] for i in members]
            lengths = [width * every[i].end for i in members]
            for run in split_runs(places, lengths, CALL_COST_TOKENS):
                inside = [i for i in members if run.first <= stretch.places[i] <= run.last]
                scores = (run.last - run.first + 1) * run.length
                pieces = parts if width == 1 else max(parts, scores // MAX_SCORES + 1)
                work += [self._rows_piece(stretch, cut) for cut in _cut(inside, pieces)]
        return work

    def _rows_piece(self, stretch: _Stretch, members: Sequence[int]) -> RowsPiece:
        """``members`` are indices in the stretch."""
        in_batch = [stretch.members[i] for i in members]
        rows, places = [self.rows[i] for i in in_batch], [stretch.places[i] for i in members]
        numbers = np.arange(max(row.width for row in rows))
        firsts = np.array([self.first_tokens[i] for i in in_batch])
        lasts = np.array([row.width - 1 for row in rows])
        tokens = np.minimum(numbers, lasts[:, None])
        return RowsPiece(
            stretch.memory,
            places[0],
            places[-1],
            tuple(place - places[0] for place in places),
            firsts[:, None] + tokens,
            np.array([row.start + 1 for row in rows])[:, None] + tokens,
        )

    def _prefill_pieces(self, stretch: _Stretch, heads: int, group: int) -> list[Piece]:
        return [
            PrefillPiece(i, self.rows[i], place, head, *cut)
            for i, place in zip(stretch.members, stretch.places, strict=True)
            for cut in tiles.cut(self.rows[i], heads, group)
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
        pages = self._pages
        if self.by_token and isinstance(keys, np.ndarray) and isinstance(values, np.ndarray):
            new = pages.write_tokens(layer, keys[:, :, 0], values[:, :, 0], self._new_tokens)
            if self._unpacked:
                tokens, slots, positions = self._new_unpacked
                for target, each in zip(pages.unpacked.both(layer), new, strict=True):
                    target[slots, :, positions] = each[tokens]
        else:
            rounded = [
                pages.write_row(layer, k[:, : row.width], v[:, : row.width], table, row.start)
                for k, v, row, table in zip(keys, values, self.rows, self.tables, strict=True)
            ]
            for i in self._unpacked:
                row = self.rows[i]
                for target, each in zip(pages.unpacked.both(layer), rounded[i], strict=True):
                    target[row.slot, :, row.start : row.end] = each
        for i in self._unpacked:
            pages.unpacked.filled(layer, self.rows[i].slot, self.rows[i].end)

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
        heads, group = asked[0].shape[:2]
        if self._began.copied:
            self._pages.unpacked.both(layer)  # before several threads want it
        for stretch in self._stretches:
            rows, work = stretch.rows, self._work(stretch, heads, group)
            if rows is None:
                kept = self._pages.unpacked.both(layer)
            else:
                kept = rows.both(layer)
                rows.read_together(layer, self._low(layer, stretch))
            pieces = iter(work.pieces)  # shared: the first free thread takes the next piece
            run = partial(self._attend_pieces, pieces, kept, asked, out, how)
            in_parallel([run] * work.threads)
            self._copy(layer, stretch, kept)
        lanes = self._lanes
        if lanes and isinstance(asked, np.ndarray) and isinstance(out, np.ndarray):
            for stretch in chain.from_iterable(lanes):
                if stretch.rows is not None:
                    stretch.rows.both(layer)  # lanes may share the memory
            in_parallel(
                [partial(self._attend_lane, lane, layer, asked, out, how) for lane in lanes]
            )
        self._end_copies(layer)
        for span in () if self.given is None else self.given.spans:
            (stretch,) = self._stretches or self._lanes[0]
            both = stretch.rows or self._pages.unpacked
            kept = [array[stretch.places[0]] for array in both.both(layer)]
            within = partial(self._attend_within, span, kept, asked, out, how)
            in_parallel([partial(within, head) for head in range(heads)])

    def attend_to_nothing(self, layer: int) -> None:
        """Do what `attend_to` does beside that, for a layer whose attention nobody needs."""
        copied = self._began.copied.keys()
        for stretch in chain(self._stretches, *self._lanes) if copied else ():
            if stretch.rows is not None and not copied.isdisjoint(stretch.members):
                stretch.rows.read_together(layer, self._low(layer, stretch))
                self._copy(layer, stretch, stretch.rows.both(layer))
        self._end_copies(layer)

    def _end_copies(self, layer: int) -> None:
        for i, end in self._began.copied.items():
            self._pages.unpacked.filled(layer, self.rows[i].slot, end)

    def _attend_lane(
        self, lane: Sequence[_Stretch], layer: int, asked: Array, out: Array, how: How
    ) -> None:
        """Read the rows of a lane and write their attention. May be called on any thread."""
        for stretch in lane:
            assert stretch.rows is not None
            kept = stretch.rows.both(layer)
            stretch.rows.read(layer, self._low(layer, stretch))
            heads = stretch.rows.heads(layer)
            work = self._work(stretch, heads.stop - heads.start, asked.shape[2])
            sinks = None if how.sinks is None else how.sinks[heads]
            its = how._replace(sinks=sinks)
            self._attend_pieces(iter(work.pieces), kept, asked[:, heads], out[:, heads], its)
            self._copy(layer, stretch, kept)

    def _copy(self, layer: int, stretch: _Stretch, kept: Kept) -> None:
        """Copy values that were read from pages to the unpacked rows in which they are missing. May
        be called on any thread."""
        if stretch.rows is None:
            return
        heads, low = stretch.rows.heads(layer), self._low(layer, stretch)
        for i, place in zip(stretch.members, stretch.places, strict=True):
            if (end := self._began.copied.get(i, 0)) and end > low:
                both = [array[place] for array in kept]
                self._pages.unpacked.copy(layer, self.rows[i].slot, heads, both, low, end)

    def _attend_pieces(
        self, pieces: Iterator[Piece], kept: Kept, asked: Arrays, out: Arrays, how: How
    ) -> None:
        attend_to_chunk = attend_to_prefill if graphs.unusable() else tiles.attend_to_prefill
        for piece in pieces:
            if isinstance(piece, PrefillPiece):
                attend_to_chunk(piece, kept, asked[piece.member], out[piece.member], how)
            elif isinstance(asked, np.ndarray) and isinstance(out, np.ndarray):
                self._way_of_rows(piece)(piece, kept, asked, out, how)

    def _attend_within(
        self,
        span: tuple[int, int],
        kept: Kept,
        asked: Arrays,
        out: Arrays,
        how: How,
        head: int,
    ) -> None:
        """Overwrite the attention of the tokens in a ``span`` of the only row, which attend to
        the whole span. The bits do not depend on how a prompt is divided."""
        (row,) = self.rows
        its = slice(span[0] - row.start, span[1] - row.start)
        sinks = None if how.sinks is None else how.sinks[head]
        if self.by_token and isinstance(asked, np.ndarray) and isinstance(out, np.ndarray):
            queries, target = (each[its, head, :, 0].swapaxes(0, 1) for each in (asked, out))
        else:
            queries, target = (each[0][head, :, its] for each in (asked, out))
        keys, values = (array[head] for array in kept)
        tiles.attend(queries, (keys, values), span[0], how, sinks, target, span)

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
        kinds.setdefault(_width_class(row), []).append(number)
    return list(kinds.values())


def _width_class(row: Row) -> int:
    return (row.width - 1).bit_length()


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
