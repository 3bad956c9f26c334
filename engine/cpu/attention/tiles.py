"""Attention to tiles of keys, whose result has the same bits whatever else is computed with it.

A BLAS sums in an order that depends on the shape of a product, and therefore on the length of a
row, on chunk borders, and on the rows of a batch. ONNX Runtime's products sum key after key, in
blocks that start at fixed positions, if one thread computes each product. Keys are therefore
padded to whole tiles, which adds zeros, and every query goes through the same operations, alone
or among others. Chunks of prompts are computed head by head (`attend_to_prefill`), rows with few
tokens together (`engine.cpu.attention.few_tokens`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import gcd
from threading import local
from typing import NamedTuple

import numpy as np

from engine.backend.threads import num_threads
from engine.batch.ragged import Row
from engine.cpu.attention.pieces import ABOVE_DIAGONAL, QUERIES_AT_ONCE, How, Kept, PrefillPiece
from engine.cpu.onnx.graphs import CONTRIB, Graph, Session
from engine.cpu.pages.rounding import Array

TILE = 64
"""Softmax sums this many positions at a time, and products use whole blocks of them."""
FEWEST = 128
"""Min number of keys: with wide heads, fewer keys would be summed in other blocks."""

MAX_SCORES = 1 << 22
"""Max scores of a product with more than `FEWEST_QUERIES` queries, so that they stay in the
processor's last-level cache."""
FEWEST_QUERIES = 32
"""Min queries per product. Keys are packed for each product, which pays off from this number of
queries of a head."""
FEWEST_QUERIES_EVEN = 16
"""The same if a part is cut so that all threads have equally many products."""
MAX_KEPT, MAX_KEPT_FLOATS = 64, 5 << 20
"""Max shapes of products whose arguments a thread keeps, and max size of their memory, which the
shapes share."""


def cut(row: Row, heads: int, group: int) -> list[tuple[int, int]]:
    """Cut the queries of ``row`` into equal parts. A part is one product for each head of keys.

    All threads get equally many products if possible: 9 take two threads as long as 10."""
    threads = num_threads()
    most = min(max(MAX_SCORES // (group * row.end), FEWEST_QUERIES), QUERIES_AT_ONCE)
    parts = max(-(-row.width // most), min(row.width, -(-threads // heads)))
    step = threads // gcd(heads, threads)
    even = -(-parts // step) * step
    if row.width >= even * FEWEST_QUERIES_EVEN:
        parts = even
    return list(pairwise(row.width * i // parts for i in range(parts + 1)))


def window_alignment(dim: int) -> int:
    """Return the number of positions to whose multiples windows are aligned, for values of
    ``dim`` numbers.

    Products with values sum this many positions at a time (`MlasSgemmOperation`: blocks of 128
    columns by 128 rows, longer if there are fewer columns)."""
    columns = rows = 128
    while columns > 16 and columns // 2 >= dim:
        columns, rows = columns // 2, rows * 2
    return rows


def tiled(start: int, end: int, window: int | None, dim: int) -> tuple[int, int]:
    """Return the first position and the end of the tiles for queries at ``start`` to ``end``."""
    low = 0
    if window is not None:
        unit = window_alignment(dim)
        low = max(0, start - window + 1) // unit * unit
    return low, low + max(FEWEST, -(-(end - low) // TILE) * TILE)


@cache
def _scores_session(softcap: float | None) -> Session:
    """Return the session that computes scores (1, 1, queries, keys) of queries (1, 1, queries,
    dim) and keys (1, 1, keys, dim)."""
    graph = Graph()
    queries = graph.input("queries", 1, 1, "queries", "dim")
    keys = graph.input("keys", 1, 1, "keys", "dim")
    graph.output(scores_of(graph, queries, keys, softcap), 1, 1, "queries", "keys")
    return graph.session(threads=1)


@cache
def _shares_session(has_sinks: bool) -> Session:
    """Return the session that computes the weights of keys: the softmax of masked scores
    (1, 1, queries, keys).

    Sinks (1, 1, queries, `TILE`) are additional scores in front. They count in the softmax, but
    have no values."""
    graph = Graph()
    scores = graph.input("scores", 1, 1, "queries", "keys")
    sinks = graph.input("sinks", 1, 1, "queries", TILE) if has_sinks else ""
    graph.output(softmax_of(graph, scores, sinks), 1, 1, "queries", "keys")
    return graph.session(threads=1)


@cache
def _sums_session() -> Session:
    """Return the session that sums values (1, 1, keys, dim), weighted by shares
    (1, 1, queries, keys)."""
    graph = Graph()
    shares = graph.input("shares", 1, 1, "queries", "keys")
    values = graph.input("values", 1, 1, "keys", "dim")
    graph.output(graph.node("MatMul", shares, values), 1, 1, "queries", "dim")
    return graph.session(threads=1)


class _Shape(NamedTuple):
    """The key of the arguments of a part's products, besides keys and values."""

    queries: int
    keys: int
    dim: int
    value_dim: int
    softcap: float | None
    has_sinks: bool

    @property
    def floats(self) -> int:
        """The memory for its queries, scores, results and sinks."""
        return self.queries * (self.dim + self.keys + self.value_dim + TILE * self.has_sinks)


class _Products:
    """The sessions of parts with one shape, with their arguments in ``memory``. Only keys and
    values are bound for each part: binding everything takes a tenth of the time of a short one."""

    def __init__(self, shape: _Shape, memory: Array) -> None:
        widths = shape.dim, shape.keys, shape.value_dim, TILE * shape.has_sinks
        cuts = np.cumsum([shape.queries * width for width in widths])
        parts = np.split(memory[: cuts[-1]], cuts[:-1])
        self.queries, self.scores, self.found, self.before = (
            part.reshape(shape.queries, width) for part, width in zip(parts, widths, strict=True)
        )
        self._scores = _scores_session(shape.softcap).bound()
        self._shares = _shares_session(shape.has_sinks).bound()
        self._sums = _sums_session().bound()
        _bind(self._scores.input, 0, self.queries)
        _bind(self._scores.output, 0, self.scores)
        # Weights replace their scores, so that half as much has to stay in the cache.
        _bind(self._shares.input, 0, self.scores)
        if shape.has_sinks:
            _bind(self._shares.input, 1, self.before)
        _bind(self._shares.output, 0, self.scores)
        _bind(self._sums.input, 0, self.scores)
        _bind(self._sums.output, 0, self.found)

    def score(self, keys: Array) -> None:
        """Compute the scores of the queries."""
        _bind(self._scores.input, 1, keys)
        self._scores()

    def sum(self, values: Array) -> None:
        """Compute the results from the masked scores, which are overwritten."""
        self._shares()
        _bind(self._sums.input, 1, values)
        self._sums()


def _bind(bind: Callable[..., None], number: int, array: Array) -> None:
    """Bind the contiguous ``array`` (rows, columns)."""
    bind(number, np.float32, (1, 1, *array.shape), array.__array_interface__["data"][0])


class _KeptProducts(local):
    """The memory of this thread, and the most recent products that use it."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.float32)
        self._products: dict[_Shape, _Products] = {}

    def products(self, shape: _Shape) -> _Products:
        found = self._products.pop(shape, None)
        if found is None:
            if shape.floats > MAX_KEPT_FLOATS:
                return _Products(shape, np.empty(shape.floats, np.float32))
            if shape.floats > len(self._memory):
                self._products.clear()
                self._memory = np.empty(shape.floats, np.float32)
            if len(self._products) >= MAX_KEPT:
                del self._products[next(iter(self._products))]
            found = _Products(shape, self._memory)
        self._products[shape] = found
        return found


_kept = _KeptProducts()


def scores_of(graph: Graph, queries: str, keys: str, softcap: float | None) -> str:
    """Return the scores of ``keys``. A cap is always applied in the graph of the product:
    ONNX Runtime merges its first factor into the product, which changes the bits."""
    scores = graph.node("FusedMatMul", queries, keys, domain=CONTRIB, transB=1)
    if softcap is None:
        return scores
    cap = graph.number(softcap)
    return graph.node("Mul", graph.node("Tanh", graph.node("Div", scores, cap)), cap)


def shares_of(graph: Graph, scores: str, bias: str, sinks: str) -> str:
    """Return the weights of keys: the softmax of ``scores`` plus ``bias``, after ``sinks`` if
    there are any."""
    return softmax_of(graph, graph.node("Add", scores, bias), sinks)


def softmax_of(graph: Graph, masked: str, sinks: str) -> str:
    """Return the weights of keys for ``masked`` scores, after ``sinks`` if there are any."""
    if not sinks:
        return graph.node("Softmax", masked, axis=-1)
    found = graph.node("Softmax", graph.node("Concat", sinks, masked, axis=-1), axis=-1)
    first, last = graph.integers(TILE), graph.integers(np.iinfo(np.int64).max)
    return graph.node("Slice", found, first, last, graph.integers(-1))


def before_scores(sinks: Array, count: int) -> Array:
    """Return ``sinks`` (..., groups, 1, 1) as the first `TILE` scores of ``count`` queries: (1,
    ..., groups, count, `TILE`)."""
    before: Array = np.full((1, *sinks.shape[:-2], count, TILE), -np.inf, np.float32)
    before[..., :1] = sinks
    return before


def before_scores_of_rows(sinks: Array, heads: int, queries: int) -> Array:
    """Return ``sinks`` (heads, group, 1, 1) as the first scores of the ``queries`` of rows:
    (1, heads, queries, `TILE`)."""
    before = before_scores(sinks, queries // sinks.shape[1]).swapaxes(2, 3)
    return before.reshape(1, heads, queries, TILE)


def _mask(
    scores: Array, start: int, low: int, window: int | None, span: tuple[int, int] | None
) -> None:
    """Set ``scores`` (groups, tokens, keys) to minus infinity where a token does not attend to a
    key. Tokens start at position ``start``, keys at ``low``. All tokens also attend to the
    positions of a ``span``.

    NumPy touches only the last keys. An addition in the graph would read and write all scores,
    which takes a tenth of the time of a long prompt's attention."""
    first = start if window is None else low  # all tokens attend to the keys before it
    _, tokens, count = scores.shape
    if window is None and span is None:
        scores[:, :, first - low :] += ABOVE_DIAGONAL[:tokens, : low + count - first]
        return
    keys, queries = np.arange(first, low + count), np.arange(start, start + tokens)[:, None]
    unseen = keys > queries
    if window is not None:
        unseen |= keys <= queries - window
    if span is not None:
        unseen &= (keys < span[0]) | (keys >= span[1])
    np.copyto(scores[:, :, first - low :], -np.inf, where=unseen)


def attend(
    queries: Array,
    kept: Kept,
    start: int,
    how: How,
    sinks: Array | None,
    out: Array,
    span: tuple[int, int] | None = None,
) -> None:
    """Write the attention of scaled ``queries`` (groups, tokens, dim) at ``start`` and the
    following positions, for one head of keys, to ``out`` (groups, tokens, value dim).

    Keys and values are (positions, dim); the last tile may reach beyond the row, where they are
    finite. Sinks are (groups, 1, 1). If there is a ``span``, all queries are in it and attend to
    all of it. May be called on any thread."""
    groups, tokens, dim = queries.shape
    low, high = tiled(start, start + tokens, how.window, kept[1].shape[1])
    # A product of one row uses other operations.
    twice = 2 if groups * tokens == 1 else 1
    keys, values = (each[low:high] for each in kept)
    products = _kept.products(
        _Shape(
            twice * groups * tokens,
            high - low,
            dim,
            values.shape[1],
            how.softcap,
            sinks is not None,
        )
    )
    products.queries.reshape(groups, twice * tokens, dim)[...] = queries
    if sinks is not None:
        products.before[...] = before_scores(sinks, twice * tokens).reshape(-1, TILE)
    products.score(keys)
    scores = products.scores.reshape(groups, twice * tokens, high - low)
    _mask(scores, start, low, how.window, span)
    products.sum(values)
    out[...] = products.found.reshape(groups, twice * tokens, -1)[:, :tokens]


def attend_to_prefill(piece: PrefillPiece, kept: Kept, asked: Array, out: Array, how: How) -> None:
    """Like `pieces.attend_to_prefill`."""
    row, its = piece.row, slice(piece.first, piece.last)
    both = [array[piece.place, piece.head] for array in kept]
    sinks = None if how.sinks is None else how.sinks[piece.head]
    queries, target = asked[piece.head, :, its], out[piece.head, :, its]
    attend(queries, both, row.start + piece.first, how, sinks, target)
