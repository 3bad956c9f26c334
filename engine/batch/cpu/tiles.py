"""Attention to tiles of keys, whose result has the same bits whatever else is computed with it.

A BLAS sums in an order that depends on the shape of a product, and so on the length of a row,
on the borders of chunks, and on the rows of a batch. ONNX Runtime's products sum key after key
in blocks that begin at fixed positions, if one thread computes each product. So keys are padded
to whole tiles, which adds zeros, and every query goes through the same operations, alone or
among others. Chunks of prompts go head by head (`attend_to_prefill`), rows with few tokens
together (`engine.batch.cpu.few_tokens`).
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np

from engine.backend.graphs import CONTRIB, Graph, Session
from engine.backend.threads import num_threads
from engine.batch.cpu.pieces import QUERIES_AT_ONCE, How, PrefillPiece
from engine.batch.ragged import Row
from engine.cache.rounding import Array

TILE = 64
"""Softmax adds up as many positions at a time, and products take whole blocks of it."""
FEWEST = 128
"""The fewest keys: with wide heads, fewer keys would be summed in other blocks."""

MOST_SCORES = 1 << 20
"""Scores that a product has at most if it has more than `FEWEST_QUERIES`: they stay in the
processor's last cache."""
FEWEST_QUERIES = 32
"""Keys are packed for each product, and this many queries of a head make it worth while."""


def cut(row: Row, heads: int, group: int) -> list[tuple[int, int]]:
    """Cut the queries of ``row`` in equal parts. A part is a product for each head of keys."""
    most = min(max(MOST_SCORES // (group * row.end), FEWEST_QUERIES), QUERIES_AT_ONCE)
    parts = max(-(-row.width // most), min(row.width, -(-num_threads() // heads)))
    return list(pairwise(row.width * i // parts for i in range(parts + 1)))


def anchor(dim: int) -> int:
    """Return of what positions windows begin at a multiple, for values of ``dim`` numbers.

    Products with values sum so many positions at a time (`MlasSgemmOperation`: blocks of 128
    columns by 128 rows, longer where there are fewer columns)."""
    columns = rows = 128
    while columns > 16 and columns // 2 >= dim:
        columns, rows = columns // 2, rows * 2
    return rows


def tiled(start: int, end: int, window: int | None, dim: int) -> tuple[int, int]:
    """Return the first position and the end of the tiles for queries at ``start`` to ``end``."""
    low = 0 if window is None else max(0, start - window + 1) // anchor(dim) * anchor(dim)
    return low, low + max(FEWEST, -(-(end - low) // TILE) * TILE)


@cache
def _session(softcap: float | None, has_sinks: bool) -> Session:
    """Return attention of queries (1, 1, queries, dim) to keys and values (1, 1, keys, dim), with
    a bias (groups, tokens, keys) on scores in the shape (-1, tokens, keys).

    Sinks (1, groups, tokens, `TILE`) are scores before these, which have shares and no values."""
    graph = Graph()
    queries = graph.input("queries", 1, 1, "queries", "dim")
    keys = graph.input("keys", 1, 1, "keys", "dim")
    values = graph.input("values", 1, 1, "keys", "value_dim")
    bias = graph.input("bias", 1, 1, "tokens", "keys")
    shape = graph.input("shape", 4, dtype=np.int64)
    sinks = graph.input("sinks", 1, "groups", "tokens", TILE) if has_sinks else ""
    scores = scores_of(graph, queries, keys, softcap)
    found = shares_of(graph, graph.node("Reshape", scores, shape), bias, sinks)
    found = graph.node("Reshape", found, graph.node("Shape", scores))
    graph.output(graph.node("MatMul", found, values), 1, 1, "queries", "value_dim")
    return graph.session(threads=1)


def scores_of(graph: Graph, queries: str, keys: str, softcap: float | None) -> str:
    """Return the scores of ``keys``. A cap follows at once: ONNX Runtime makes its first factor a
    part of the product, which has other bits."""
    scores = graph.node("FusedMatMul", queries, keys, domain=CONTRIB, transB=1)
    if softcap is None:
        return scores
    cap = graph.number(softcap)
    return graph.node("Mul", graph.node("Tanh", graph.node("Div", scores, cap)), cap)


def shares_of(graph: Graph, scores: str, bias: str, sinks: str) -> str:
    """Return the shares of keys: the softmax of ``scores`` with ``bias``, after ``sinks`` if there
    are some."""
    masked = graph.node("Add", scores, bias)
    if not sinks:
        return graph.node("Softmax", masked, axis=-1)
    found = graph.node("Softmax", graph.node("Concat", sinks, masked, axis=-1), axis=-1)
    first, last = graph.integers(TILE), graph.integers(np.iinfo(np.int64).max)
    return graph.node("Slice", found, first, last, graph.integers(-1))


def before_scores(sinks: Array, count: int) -> Array:
    """Return ``sinks`` (..., groups, 1, 1) as the first of `TILE` scores of ``count`` queries:
    (1, ..., groups, count, `TILE`)."""
    before: Array = np.full((1, *sinks.shape[:-2], count, TILE), -np.inf, np.float32)
    before[..., :1] = sinks
    return before


def _bias(start: int, end: int, low: int, high: int, window: int | None) -> Array:
    """Return (1, 1, tokens, keys): 0 if the query attends to the key, else minus infinity."""
    bias = np.zeros((1, 1, end - start, high - low), np.float32)
    first = start if window is None else low  # all attend to those before, which may be many
    keys, queries = np.arange(first, high), np.arange(start, end)[:, None]
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    bias[0, 0, :, first - low :][~seen] = -np.inf
    return bias


def _part(array: Array, low: int, high: int, end: int) -> Array:
    """Return positions ``low`` to ``high`` of ``array`` (positions, dim), zeros from ``end`` on.

    What a slot held there before may be anything, and nothing is a share of zero of NaN."""
    if end < high:
        part: Array = np.zeros((high - low, array.shape[1]), np.float32)
        part[: end - low] = array[low:end]
    else:
        part = array[low:high]
    return part[None, None]


def attend(
    queries: Array, kept: tuple[Array, Array], start: int, how: How, sinks: Array | None
) -> Array:
    """Return the attention of scaled ``queries`` (groups, tokens, dim) at ``start`` and the
    positions after it, for one head of keys.

    Keys and values are (positions, dim), sinks (groups, 1, 1). Called on any thread."""
    groups, tokens, dim = queries.shape
    end = start + tokens
    low, high = tiled(start, end, how.window, kept[1].shape[1])
    flat = queries.reshape(1, 1, groups * tokens, dim)
    if alone := flat.shape[2] == 1:  # a product of one row takes other operations
        flat, tokens = np.repeat(flat, 2, axis=2), 2
    bias = _bias(start, end, low, high, how.window)
    shape = np.array([1, groups, tokens, high - low])
    inputs = [np.ascontiguousarray(flat), *(_part(each, low, high, end) for each in kept)]
    inputs += [bias, shape]
    if sinks is not None:
        inputs.append(before_scores(sinks, tokens))
    found: Array = _session(how.softcap, sinks is not None)(*inputs)[0]
    return found[0, :, :1] if alone else found.reshape(groups, tokens, -1)


def attend_to_prefill(
    piece: PrefillPiece, kept: tuple[Array, Array], asked: Array, out: Array, how: How
) -> None:
    """Do what `pieces.attend_to_prefill` does."""
    its = slice(piece.first, piece.last)
    both = kept[0][piece.row.slot.row, piece.head], kept[1][piece.row.slot.row, piece.head]
    sinks = None if how.sinks is None else how.sinks[piece.head]
    found = attend(asked[piece.head, :, its], both, piece.row.start + piece.first, how, sinks)
    out[piece.head, :, its] = found
