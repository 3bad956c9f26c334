"""Attention of rows with few tokens, where they lie in a slab: the bits of `tiles` in one call.

ONNX Runtime's op for grouped queries reads keys and values in place if it thinks of them as its
cache. It is told that all rows are one, with as many heads as they have together, and that the
queries of a head are tokens: so it packs keys once for all of them, and the bias says which of
them attends to what. Without a causal mask of its own it computes products and softmax of whole
rows, with the operations of `engine.batch.cpu.tiles`.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.backend.graphs import CONTRIB, Graph, Session
from engine.batch.cpu.pieces import How, RowsPiece
from engine.batch.cpu.tiles import TILE, tiled
from engine.cache.rounding import Array

_DIMS = 8
"""Heads are a multiple of this wide; the op refuses others."""


def possible(kept: tuple[Array, Array], how: How) -> bool:
    """Return whether `attend` can do it. The op rounds capped scores otherwise, and knows no sinks
    of tokens."""
    dims = {array.shape[-1] for array in kept}
    return how.sinks is None and how.softcap is None and len(dims) == 1 and not dims.pop() % _DIMS


@cache
def _session(heads: int) -> Session:
    graph = Graph()
    asked = graph.input("asked", 1, "tokens", "width")
    new = [graph.input(name, 1, "new", "width") for name in ("new_keys", "new_values")]
    kept = [graph.input(name, 1, heads, "slots", "dim") for name in ("keys", "values")]
    length = graph.input("length", 1, dtype=np.int32)
    total = graph.input("total", dtype=np.int32)
    bias = graph.input("bias", 1, "bias_heads", "tokens", "positions")
    inputs = (asked, *new, *kept, length, total, "", "", "", bias)
    sizes = {"num_heads": heads, "kv_num_heads": heads}
    found, *same = graph.nodes(
        "GroupQueryAttention", *inputs, outputs=3, domain=CONTRIB, scale=1.0, causal=0, **sizes
    )
    graph.output(found, 1, "tokens", "width")
    for array in same:
        graph.output(array, 1, heads, "slots", "dim")
    return graph.session(threads=1)


class Call:
    """The arguments of one piece, for layers with the same heads and window."""

    def __init__(self, piece: RowsPiece, heads: int, group: int, dim: int, how: How) -> None:
        rows, width = piece.last - piece.first + 1, piece.width
        count = width * group
        tokens = max(2, count)  # a product of one row takes other operations
        self._low, high = tiled(int(piece.ends.min()) - 1, piece.length, how.window, dim)
        self._high = max(high, self._low + -(-tokens // TILE) * TILE)  # the op wants no fewer keys
        self._members = list(zip(piece.places, piece.lengths, strict=True))
        both: Array = np.zeros((2, 1, tokens, rows * heads * dim), np.float32)
        self.asked, self.found = both[:, 0, :count].reshape(2, width, group, rows, heads, dim)
        nothing: Array = np.zeros((1, 0, rows * heads * dim), np.float32)
        positions = np.int32(self._high - self._low)
        self._memory = {
            0: both[0],
            1: nothing,
            2: nothing,
            5: np.array([positions - 1]),
            6: np.array(positions),
            7: self._bias(piece, heads, group, tokens, how.window),
        }
        self._bound = _session(rows * heads).bound()
        for number, array in self._memory.items():
            self._bound.input(number, array.dtype, array.shape, array.ctypes.data)
        self._bound.output(0, np.float32, both[1].shape, both[1].ctypes.data)

    def _bias(
        self, piece: RowsPiece, heads: int, group: int, tokens: int, window: int | None
    ) -> Array:
        """Return (1, rows * heads, tokens, positions), or (1, 1, ...) if there is one row."""
        rows = piece.last - piece.first + 1
        sharing = 1 if rows == 1 else heads
        positions = np.arange(self._low, self._high)
        seen = positions < piece.ends[..., None]
        if window is not None:
            seen &= positions >= piece.ends[..., None] - window
        bias: Array = np.zeros((1, rows * sharing, tokens, len(positions)), np.float32)
        count = piece.width * group
        by_row = bias[0, :, :count].reshape(rows, sharing, piece.width, group, -1)
        masked = np.where(seen, np.float32(0), np.float32(-np.inf))
        by_row[list(piece.places)] = masked[:, None, :, None]
        return bias

    def __call__(self, kept: tuple[Array, Array]) -> None:
        """Attend to keys and values (rows, heads, capacity, dim)."""
        low, high, kind = self._low, self._high, np.float32
        if high > kept[0].shape[2]:
            kept = (self._padded(kept[0]), self._padded(kept[1]))
            low = 0
        rows, heads, capacity, dim = kept[0].shape
        shape = (1, rows * heads, capacity, dim)
        for number, array in enumerate(kept):
            # Its end is past that of the array by as much as the first position is past its start,
            # but what is there is never read.
            address = array.__array_interface__["data"][0] + low * dim * array.itemsize
            self._bound.input(3 + number, kind, shape, address)
            self._bound.output(1 + number, kind, shape, address)  # the op's cache, as it is
        self._bound()

    def _padded(self, array: Array) -> Array:
        """Return a copy of the positions that count, since there are fewer in a slot."""
        rows, heads, _, dim = array.shape
        padded: Array = np.zeros((rows, heads, self._high - self._low, dim), np.float32)
        for place, length in self._members:
            padded[place, :, : length - self._low] = array[place, :, self._low : length]
        return padded


def attend(piece: RowsPiece, kept: tuple[Array, Array], asked: Array, out: Array, how: How) -> None:
    """Do what `pieces.attend_together` does, if it is `possible`."""
    _, heads, group, _, dim = asked.shape
    key = heads, group, dim, how.window
    if key not in piece.calls:
        piece.calls[key] = Call(piece, heads, group, dim, how)
    call: Call = piece.calls[key]
    places = list(piece.places)
    call.asked[:, :, places] = asked[piece.tokens, :, :, 0].transpose(1, 3, 0, 2, 4)
    call((kept[0][piece.first : piece.last + 1], kept[1][piece.first : piece.last + 1]))
    out[piece.tokens, :, :, 0] = call.found[:, :, places].transpose(2, 0, 3, 1, 4)
