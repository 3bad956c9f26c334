"""Attention of single tokens to all positions before them: the decode steps of most models.

As in `few_tokens`, but a row ends where its text does: nothing is padded to whole tiles, and no
scores are masked. What is bound to a graph stays from step to step, as long as the same slots
decode; only their lengths change. Binding it again in every layer would take as long as NumPy
takes for a short row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from engine.cpu.attention.pieces import Kept, Numbers
from engine.cpu.attention.tiles import FEWEST, TILE, before_scores_of_rows, scores_of, softmax_of
from engine.cpu.onnx.graphs import Bound, Graph, Session, Shared
from engine.cpu.pages.rounding import Array

MAX_KEPT = 32
"""Max groups of rows whose arguments are kept, the most recently used ones. A new group forms
whenever a sequence begins or ends."""
MAX_BOUND = 256
"""Max bindings of a group of rows: one per layer, and per earlier address of its arrays."""
_TRIED = (*range(FEWEST, FEWEST + 2 * TILE), 255, 256, 257, 511, 512, 513, 1000)
"""Numbers of positions to test: all remainders of a tile, and those near the blocks of products."""


class Kind(NamedTuple):
    """The properties that all layers of a kind share."""

    heads: int
    group: int
    dim: int
    value_dim: int
    softcap: float | None
    has_sinks: bool

    @property
    def queries(self) -> int:
        """Queries of a head. A single one is computed twice: a product of one row uses other
        operations."""
        return max(2, self.group)


@cache
def _session(rows: int, heads: int, softcap: float | None, has_sinks: bool) -> Session:
    """Return attention to keys and values (slots, heads, capacity, dim).

    After these, the inputs of each row are its queries (1, heads, queries, dim), the slot and the
    first position to which it attends, and their ends. A row has inputs and an output of its own,
    since operators that divide and join arrays take as long as half of a short row. Values are
    copied when the copy of keys is free again: both exceed a core's cache."""
    graph = Graph()
    keys = graph.input("keys", "slots", heads, "capacity", "dim")
    values = graph.input("values", "slots", heads, "capacity", "value_dim")
    asked, spans = [], []
    for row in range(rows):
        asked.append(graph.input(f"asked{row}", 1, heads, "queries", "dim"))
        spans.append([graph.input(f"{name}{row}", 2, dtype=np.int64) for name in ("from", "to")])
    sinks = graph.input("sinks", 1, heads, "queries", TILE) if has_sinks else ""
    axes = graph.integers(0, 2)
    for queries, span in zip(asked, spans, strict=True):
        scores = scores_of(graph, queries, graph.node("Slice", keys, *span, axes), softcap)
        shares = softmax_of(graph, scores, sinks)
        found = graph.node("MatMul", shares, graph.node("Slice", values, *span, axes))
        graph.output(found, 1, heads, "queries", "value_dim")
    return graph.session(threads=1, in_order=True)


@cache
def same_bits(kind: Kind) -> bool:
    """Return whether rows have the same bits here as if they were filled up to whole tiles.

    Softmax adds up several positions at a time. Tried with every remainder of a tile."""
    random = np.random.default_rng(0)
    capacity = -(-max(_TRIED) // TILE) * TILE
    keys, values, asked = (
        random.standard_normal((1, 1, count, dim), np.float32)
        for count, dim in (
            (capacity, kind.dim),
            (capacity, kind.value_dim),
            (kind.queries, kind.dim),
        )
    )
    values[:, :, :TILE] *= 64  # sums of values of different sizes are rounded more often
    asked *= np.float32(2 * kind.dim**-0.5)
    sinks = [np.full((1, 1, kind.queries, TILE), -np.inf, np.float32)] if kind.has_sinks else []
    for each in sinks:
        each[..., 0] = 1
    session = _session(1, 1, kind.softcap, kind.has_sinks)
    padded = _padded_session(kind.softcap, kind.has_sinks)
    for length in _TRIED:
        span = np.array([0, 0]), np.array([1, length])
        found = session(keys, values, asked, *span, *sinks)[0]
        end = -(-length // TILE) * TILE
        mask = np.where(np.arange(end) < length, np.float32(0), np.float32(-np.inf))
        both = (each[:, :, :end] for each in (keys, values))
        if not np.array_equal(found, padded(asked, *both, mask, *sinks)[0]):
            return False
    return True


@cache
def _padded_session(softcap: float | None, has_sinks: bool) -> Session:
    """Return attention of queries (1, 1, queries, dim) to whole tiles of keys, with a mask (keys)
    that is added to scores."""
    graph = Graph()
    asked = graph.input("asked", 1, 1, "queries", "dim")
    keys = graph.input("keys", 1, 1, "keys", "dim")
    values = graph.input("values", 1, 1, "keys", "value_dim")
    mask = graph.input("mask", "keys")
    sinks = graph.input("sinks", 1, 1, "queries", TILE) if has_sinks else ""
    masked = graph.node("Add", scores_of(graph, asked, keys, softcap), mask)
    shares = softmax_of(graph, masked, sinks)
    graph.output(graph.node("MatMul", shares, values), 1, 1, "queries", "value_dim")
    return graph.session(threads=1)


class Rows:
    """The arguments for some rows of arrays, in all layers of a kind and in all steps. Used by one
    thread at a time.

    It keeps addresses of arrays, not references, which would keep their memory."""

    def __init__(self, slots: Sequence[int], kind: Kind) -> None:
        rows = len(slots)
        self._session = _session(rows, kind.heads, kind.softcap, kind.has_sinks)
        self._group = kind.group
        self._tokens: slice | Numbers = slice(0)
        self._spans = np.zeros((rows, 2, 2), np.int64)
        self._spans[:, 0, 0] = slots
        self._spans[:, 1, 0] = self._spans[:, 0, 0] + 1
        shape = rows, kind.heads, kind.queries
        self._queries: Array = np.empty((*shape, kind.dim), np.float32)
        self._found: Array = np.empty((*shape, kind.value_dim), np.float32)
        self._sinks: Array = np.empty((1, kind.heads, kind.queries, TILE), np.float32)
        of_rows = zip(np.split(self._queries, rows), self._spans, strict=True)
        arrays = [array for queries, span in of_rows for array in (queries, *span)]
        self._arguments = [Shared(each) for each in arrays + [self._sinks] * kind.has_sinks]
        self._results = [Shared(each) for each in np.split(self._found, rows)]
        self._bound: dict[tuple[int, int, int, int], Bound] = {}

    def place(self, tokens: slice | Numbers, ends: Sequence[int] | Numbers) -> None:
        """Set the rows' ``tokens`` in the batch of a step, and the ends of their texts."""
        self._tokens = tokens
        self._spans[:, 1, 1] = ends

    def __call__(self, kept: Kept, asked: Array, out: Array, sinks: Array | None) -> None:
        """Write to ``out`` the result of the queries ``asked`` in a layer with these ``sinks``."""
        if sinks is not None:
            self._sinks[...] = before_scores_of_rows(sinks, *self._sinks.shape[1:3])
        places = [array.__array_interface__["data"][0] for array in kept]
        key = (*places, len(kept[0]), kept[0].shape[2])
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bind(kept, places)
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            self._bound[key] = bound
        self._queries[...] = asked[self._tokens, :, :, 0]
        bound()
        out[self._tokens, :, :, 0] = self._found[:, :, : self._group]

    def _bind(self, kept: Kept, places: Sequence[int]) -> Bound:
        bound = self._session.bound()
        for number, (array, place) in enumerate(zip(kept, places, strict=True)):
            bound.input(number, np.float32, array.shape, place)
        for number, argument in enumerate(self._arguments, len(kept)):
            bound.shared_input(number, argument)
        for number, result in enumerate(self._results):
            bound.shared_output(number, result)
        return bound


_kept: WeakKeyDictionary[object, dict[tuple[tuple[int, ...], Kind], Rows]] = WeakKeyDictionary()
_keeping = Lock()


def rows_of(memory: object, slots: tuple[int, ...], kind: Kind) -> Rows:
    """Return the arguments for these ``slots`` of the arrays in ``memory``, reusing those of the
    last step. May be called on any thread."""
    key = slots, kind
    with _keeping:
        groups = _kept.setdefault(memory, {})
        rows = groups.pop(key, None) or Rows(slots, kind)
        while len(groups) >= MAX_KEPT:
            del groups[next(iter(groups))]
        groups[key] = rows
    return rows
