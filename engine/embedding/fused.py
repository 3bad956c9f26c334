"""Attention of whole texts with ONNX Runtime's operator, which keeps no scores.

It is called once per text: its blocks then depend only on the length of the text, and so do the
bits of its result (FlashAttention-2, Dao 2023, on a CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from engine.backend.graphs import CONTRIB, Bound, Graph, Session
from engine.cache.rounding import Array


@cache
def _session(heads: int, width: int) -> Session:
    """Return attention of (1, tokens, ``width``) queries, keys and values, all of one length."""
    graph = Graph()
    inputs = [graph.input(name, 1, "tokens", width) for name in ("queries", "keys", "values")]
    found = graph.node("MultiHeadAttention", *inputs, domain=CONTRIB, num_heads=heads)
    graph.output(found, 1, "tokens", width)
    return graph.session()


class FusedAttention:
    """Attention in which every token sees all tokens of its text, with as many heads of keys as of
    queries."""

    def __init__(self, heads: int, width: int) -> None:
        """``width`` is the total width of all heads."""
        self._width = width
        self._bound: Bound = _session(heads, width).bound()

    def __call__(
        self, cuts: Sequence[tuple[int, int]], queries: Array, keys: Array, values: Array
    ) -> Array:
        """Return the attention of each text's tokens, (tokens, width), for unscaled queries.
        ``cuts`` are the first position of each text and its end."""
        asked = [np.ascontiguousarray(each) for each in (queries, keys, values)]
        found: Array = np.empty_like(asked[0])
        found[cuts[-1][1] :] = 0
        row_bytes = found.strides[0]
        for start, end in cuts:
            shape, offset = (1, end - start, self._width), start * row_bytes
            for number, array in enumerate(asked):
                self._bound.input(number, np.float32, shape, array.ctypes.data + offset)
            self._bound.output(0, np.float32, shape, found.ctypes.data + offset)
            self._bound()
        return found
