"""Attention whose result has the same bits whatever else is computed with it.

A BLAS sums in an order that depends on the shape of a product, and so on the length of a row,
on the borders of chunks, and on the rows of a batch. ONNX Runtime's products sum key after key
in blocks that begin at fixed positions, if one thread computes each product. So keys are padded
to whole tiles, which adds zeros, and every query goes through the same operations, alone or
among others.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.backend.graphs import CONTRIB, Graph, Session
from engine.cache.rounding import Array

TILE = 64
"""Softmax adds up as many positions at a time, and products take whole blocks of it."""
FEWEST = 128
"""The fewest keys: with wide heads, fewer keys would be summed in other blocks."""
ANCHOR = 1_024
"""Windows begin at a multiple of this many positions, where every block begins."""


@cache
def _session(softcap: float | None) -> Session:
    """Return attention of queries (1, 1, queries, dim) to keys and values (1, 1, keys, dim), with
    a bias (groups, tokens, keys) on scores in the shape (-1, tokens, keys)."""
    graph = Graph()
    queries = graph.input("queries", 1, 1, "queries", "dim")
    keys = graph.input("keys", 1, 1, "keys", "dim")
    values = graph.input("values", 1, 1, "keys", "value_dim")
    bias = graph.input("bias", 1, 1, "tokens", "keys")
    shape = graph.input("shape", 4, dtype=np.int64)
    scores = graph.node("FusedMatMul", queries, keys, domain=CONTRIB, transB=1)
    if softcap is not None:
        cap = graph.number(softcap)
        scores = graph.node("Mul", graph.node("Tanh", graph.node("Div", scores, cap)), cap)
    masked = graph.node("Add", graph.node("Reshape", scores, shape), bias)
    shares = graph.node(
        "Reshape", graph.node("Softmax", masked, axis=-1), graph.node("Shape", scores)
    )
    graph.output(graph.node("MatMul", shares, values), 1, 1, "queries", "value_dim")
    return graph.session(threads=1)


class Span:
    """The positions that the queries at ``start`` to ``end`` (exclusive) of a row attend to."""

    def __init__(self, start: int, end: int, window: int | None) -> None:
        oldest = 0 if window is None else max(0, start - window + 1)
        self.low = oldest // ANCHOR * ANCHOR
        self.high = self.low + max(FEWEST, -(-(end - self.low) // TILE) * TILE)
        keys, queries = np.arange(self.low, self.high), np.arange(start, end)[:, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        self.bias: Array = np.where(seen, np.float32(0), np.float32(-np.inf))[None, None]
        self.shape = np.array([1, -1, *self.bias.shape[2:]])

    def of(self, array: Array) -> Array:
        """Return these positions of ``array`` (positions, dim), and zeros where it ends."""
        part = array[self.low : self.high]
        if len(part) < self.high - self.low:
            part = np.concatenate(
                [part, np.zeros((self.high - self.low - len(part), part.shape[1]), np.float32)]
            )
        return part[None, None]


def attend(queries: Array, keys: Array, values: Array, span: Span, softcap: float | None) -> Array:
    """Return the attention of scaled ``queries`` (groups, tokens, dim) of one head of keys.

    ``keys`` and ``values`` are (positions, dim). Called on any thread."""
    groups, tokens, dim = queries.shape
    flat = queries.reshape(1, 1, groups * tokens, dim)
    if flat.shape[2] == 1:  # a single query would take other operations
        flat = np.repeat(flat, 2, axis=2)
        found = _session(softcap)(flat, span.of(keys), span.of(values), span.bias, span.shape)[0][
            :, :, :1
        ]
    else:
        found = _session(softcap)(
            np.ascontiguousarray(flat), span.of(keys), span.of(values), span.bias, span.shape
        )[0]
    attended: Array = found.reshape(groups, tokens, -1)
    return attended
