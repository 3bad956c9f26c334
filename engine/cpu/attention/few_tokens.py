"""Attention of rows with few tokens, several rows per call, with the same bits as `tiles`.

A single row is too little work for a call of ONNX Runtime from Python, and two threads that make
many short calls wait for each other to release the interpreter. One graph therefore computes all
rows of a piece, one after the other, each to its own length. It copies the keys of a row,
multiplies, copies the values, and multiplies again. Products pack their operands, reading them out
of order: from a copy in the processor's cache, that takes half as long as from memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from engine.cpu.attention import single_tokens
from engine.cpu.attention.pieces import How, Kept, Numbers, RowsPiece, as_run
from engine.cpu.attention.single_tokens import Kind, Rows, rows_of
from engine.cpu.attention.tiles import (
    FEWEST,
    TILE,
    before_scores_of_rows,
    scores_of,
    shares_of,
    tiled,
)
from engine.cpu.onnx.graphs import Graph, Session
from engine.cpu.pages.rounding import Array

MAX_COPIED_BYTES = 2 << 20
"""Max total size of a row's keys and values for which all heads are copied at once. Longer rows
copy one head at a time."""
ROWS_AT_ONCE = 8
"""Max rows per call: each number of rows needs its own graph, and a graph of many rows takes tens
of milliseconds to build."""


class _Kind(NamedTuple):
    """The key of a piece's graph, in addition to the numbers of rows and heads."""

    by_head: bool  # whether heads are copied one by one
    softcap: float | None
    has_sinks: bool


class _Span(NamedTuple):
    """The range to which a row attends: arguments of Slice."""

    begin: str
    end: str
    axes: tuple[int, ...]


class _Slots(NamedTuple):
    """Keys and values in a graph: (slots, heads, capacity, dim)."""

    keys: str
    values: str


@cache
def _session(rows: int, heads: int, kind: _Kind) -> Session:
    """Return attention of queries (rows, heads, queries, dim) to keys and values of slots.

    For each row, the inputs are a bias (1, 1, queries, keys), the first slot and position to which
    it attends, and their ends."""
    graph = Graph()
    asked = graph.input("asked", rows, heads, "queries", "dim")
    slots = _Slots(
        graph.input("keys", "slots", heads, "capacity", "dim"),
        graph.input("values", "slots", heads, "capacity", "value_dim"),
    )
    sinks = graph.input("sinks", 1, heads, "queries", TILE) if kind.has_sinks else ""
    found = []
    for number, queries in enumerate(_split(graph, asked, rows, 0)):
        bias = graph.input(f"bias{number}", 1, 1, "queries", f"keys{number}")
        begin, end = (graph.input(f"{name}{number}", 2, dtype=np.int64) for name in ("from", "to"))
        if not kind.by_head:
            part = _Span(begin, end, (0, 2))
            found.append(_attend(graph, queries, slots, part, bias, sinks, kind.softcap))
            continue
        heads_of = _split(graph, queries, heads, 1)
        sinks_of = _split(graph, sinks, heads, 1) if sinks else [""] * heads
        by_head = []
        for head, (one, before) in enumerate(zip(heads_of, sinks_of, strict=True)):
            first = graph.node("Concat", begin, graph.integers(head), axis=0)
            last = graph.node("Concat", end, graph.integers(head + 1), axis=0)
            part = _Span(first, last, (0, 2, 1))
            by_head.append(_attend(graph, one, slots, part, bias, before, kind.softcap))
        found.append(graph.node("Concat", *by_head, axis=1))
    graph.output(graph.node("Concat", *found, axis=0), rows, heads, "queries", "value_dim")
    return graph.session(threads=1, in_order=True)


def _split(graph: Graph, value: str, count: int, axis: int) -> list[str]:
    return graph.nodes("Split", value, outputs=count, axis=axis, num_outputs=count)


def _attend(
    graph: Graph,
    queries: str,
    slots: _Slots,
    part: _Span,
    bias: str,
    sinks: str,
    softcap: float | None,
) -> str:
    """Return the result of ``queries`` for this ``part`` of the slots."""
    keys = _copied(graph, slots.keys, part)
    found = shares_of(graph, scores_of(graph, queries, keys, softcap), bias, sinks)
    return graph.node("MatMul", found, _copied(graph, slots.values, part))


def _copied(graph: Graph, slots: str, part: _Span) -> str:
    return graph.node("Slice", slots, part.begin, part.end, graph.integers(*part.axes))


class Call:
    """The arguments for rows of a piece, in all layers of a kind. Used by one thread at a time.

    It has no reference to the piece, which owns it: a cycle would keep freed memory alive."""

    def __init__(
        self,
        piece: RowsPiece,
        members: list[int],
        kept: Kept,
        heads: int,
        group: int,
        how: How,
        *,
        by_head: bool,
    ) -> None:
        dim = kept[1].shape[3]
        numbers, places = piece.tokens[members], [piece.places[i] for i in members]
        rows, width = numbers.shape
        spans = _spans(piece, members, how.window, dim)
        kind = _Kind(by_head, how.softcap, how.sinks is not None)
        self._shape = rows, width, heads, group
        self._tokens = as_run(numbers.ravel())
        self._twice = width * group == 1  # a product of one row uses other operations
        queries = max(2, width * group)
        self._bound = _session(rows, heads, kind).bound()
        self._found: Array = np.empty((rows, heads, queries, dim), np.float32)
        self._bound.output(0, np.float32, self._found.shape, self._found.ctypes.data)
        self._arguments: list[Any] = []
        if how.sinks is not None:
            self._add(before_scores_of_rows(how.sinks, *self._found.shape[1:3]))
        for place, ends, (low, high) in zip(places, piece.ends[members], spans, strict=True):
            bias = np.repeat(_bias(ends, low, high, how.window), group, axis=0)
            self._add(np.repeat(bias, queries // len(bias), axis=0)[None, None])
            slot = piece.first + place
            self._add(np.array([slot, low]))
            self._add(np.array([slot + 1, high]))

    def _add(self, array: Array | Numbers) -> None:
        """Bind the next argument after queries, keys and values."""
        kept = np.ascontiguousarray(array)
        number = 3 + len(self._arguments)
        self._arguments.append(kept)
        self._bound.input(number, kept.dtype, kept.shape, kept.ctypes.data)

    def __call__(self, kept: Kept, asked: Array, out: Array, sinks: Array | None) -> None:
        """Write the attention of the queries ``asked`` to ``out``, in a layer with these
        ``sinks``."""
        rows, width, heads, group = self._shape
        if sinks is not None:  # different in each layer
            self._arguments[0][...] = before_scores_of_rows(sinks, *self._found.shape[1:3])
        tokens = self._tokens
        given = asked[tokens, :, :, 0].reshape(rows, width, heads, group, -1).swapaxes(1, 2)
        queries = given.reshape(rows, heads, width * group, -1)
        if self._twice:
            queries = np.repeat(queries, 2, axis=2)
        queries = np.ascontiguousarray(queries)
        for number, array in enumerate((queries, *kept)):
            address = array.__array_interface__["data"][0]
            self._bound.input(number, np.float32, array.shape, address)
        self._bound()
        found = self._found[:, :, : width * group].reshape(rows, heads, width, group, -1)
        out[tokens, :, :, 0] = found.swapaxes(1, 2).reshape(rows * width, heads, group, -1)


def _bias(ends: Numbers, low: int, high: int, window: int | None) -> Array:
    """Return (tokens, keys): 0 if the token attends to the key, else minus infinity. ``ends``:
    see `RowsPiece`."""
    keys = np.arange(low, high)
    seen = keys < ends[:, None]
    if window is not None:
        seen &= keys >= ends[:, None] - window
    return np.where(seen, np.float32(0), np.float32(-np.inf))


def _spans(
    piece: RowsPiece, members: list[int], window: int | None, dim: int
) -> list[tuple[int, int]]:
    """Return the tiles of these rows: their first positions and ends."""
    ends = piece.ends[members]
    firsts, lasts = (ends.min(axis=1) - 1).tolist(), ends.max(axis=1).tolist()
    return [tiled(*each, window, dim) for each in zip(firsts, lasts, strict=True)]


def _calls(piece: RowsPiece, kept: Kept, heads: int, group: int, how: How) -> list[Call | Rows]:
    dims = kept[0].shape[3], kept[1].shape[3]
    kind = Kind(heads, group, *dims, how.softcap, how.sinks is not None)
    most = MAX_COPIED_BYTES // (4 * heads * sum(dims))
    by_kind: dict[str, list[int]] = {"whole": [], "tiles": [], "by head": []}
    may_be_whole = piece.width == 1 and how.window is None and single_tokens.same_bits(kind)
    members = list(range(len(piece.places)))
    for member, (low, high) in enumerate(_spans(piece, members, how.window, dims[1])):
        if high - low > most:
            by_kind["by head"].append(member)
        elif may_be_whole and piece.lengths[member] >= FEWEST:
            by_kind["whole"].append(member)
        else:
            by_kind["tiles"].append(member)
    whole = []
    for some in _at_most(ROWS_AT_ONCE, by_kind["whole"]):
        rows = rows_of(piece.memory, tuple(piece.first + piece.places[i] for i in some), kind)
        rows.place(as_run(piece.tokens[some, 0]), piece.ends[some, 0])
        whole.append(rows)
    tiles, heads_alone = _at_most(ROWS_AT_ONCE, by_kind["tiles"]), _at_most(1, by_kind["by head"])
    return [
        *whole,
        *(Call(piece, some, kept, heads, group, how, by_head=False) for some in tiles),
        *(Call(piece, some, kept, heads, group, how, by_head=True) for some in heads_alone),
    ]


def _at_most(count: int, members: list[int]) -> list[list[int]]:
    return [members[first : first + count] for first in range(0, len(members), count)]


def attend(piece: RowsPiece, kept: Kept, asked: Array, out: Array, how: How) -> None:
    """Like `pieces.attend_together`."""
    heads, group = asked.shape[1:3]
    dims = asked.shape[-1], kept[1].shape[3]
    key = heads, group, dims, how.window, how.softcap, how.sinks is None
    if key not in piece.calls:
        piece.calls[key] = _calls(piece, kept, heads, group, how)
    for call in piece.calls[key]:
        call(kept, asked, out, how.sinks)
