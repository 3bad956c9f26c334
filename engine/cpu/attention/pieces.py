"""Attention in NumPy, piece by piece: several rows together, or one row of a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch.ragged import Row
from engine.cpu.pages.rounding import Array

FEW_QUERIES = 3
"""Number of queries per head of keys up to which vector products, without OpenBLAS's packing, take
half as long as matrix products."""
QUERIES_AT_ONCE = 128
"""Max queries of a row in one product, so that little is computed above the diagonal."""
ABOVE_DIAGONAL: Array = np.triu(
    np.full((QUERIES_AT_ONCE, 2 * QUERIES_AT_ONCE), -np.inf, np.float32), 1
)
"""Minus infinity if a key comes after its query, else 0. One table for all widths: a table for each
width would take more than a hundred kilobytes that the ledger does not count."""

Numbers = NDArray[np.intp]
Kept = Sequence[Array]
"""The keys and the values of a layer: (rows, kv_heads, capacity, dim)."""


def as_run(numbers: Numbers) -> slice | Numbers:
    """Return ``numbers`` as a slice if each follows the one before it."""
    first, last = int(numbers[0]), int(numbers[-1])
    is_run = np.array_equal(numbers, np.arange(first, last + 1))
    return slice(first, last + 1) if is_run else numbers


class Mask(NamedTuple):
    """The positions to which rows of several tokens attend."""

    low: int  # the first position to which any token attends
    tail: int  # counted from ``low``; from here on, not every token attends
    bias: Array
    """(rows of the arrays, 1, width, 1, positions from ``tail`` on): minus infinity if a token does
    not attend to a position, else 0."""


@dataclass(frozen=True, eq=False)
class RowsPiece:
    """Rows ``first`` to ``last`` (inclusive) of the arrays with their values, with about the same
    number of tokens."""

    memory: object  # of the arrays
    first: int
    last: int
    places: tuple[int, ...]  # indices of the members among these rows
    tokens: Numbers  # (members, width): indices in the batch; shorter rows repeat their last
    ends: Numbers  # (members, width): number of positions before the end of each token
    _masks: dict[int | None, Mask] = field(default_factory=dict)
    calls: dict[Any, Any] = field(default_factory=dict)
    """Arguments for `engine.cpu.attention.few_tokens`, for each kind of layer."""

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    @cached_property
    def lengths(self) -> list[int]:
        """Number of positions of each member."""
        found: list[int] = self.ends[:, -1].tolist()
        return found

    @cached_property
    def length(self) -> int:
        return max(self.lengths)

    @cached_property
    def single_tokens(self) -> slice | Numbers:
        """The token of each member, if each has one."""
        return as_run(self.tokens[:, 0])

    @property
    def cost(self) -> int:
        return (self.last - self.first + 1) * self.length * self.width

    def mask(self, window: int | None) -> Mask:
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Mask:
        low = 0 if window is None else max(0, int(self.ends.min()) - window)
        # Without a window, positions to which all tokens attend are not checked: there may be many.
        tail = 0 if window is not None else int(self.ends.min())
        keys = np.arange(low + tail, self.length)
        seen = keys < self.ends[..., None]
        if window is not None:
            seen &= keys >= self.ends[..., None] - window
        bias = np.zeros((self.last - self.first + 1, *seen.shape[1:]), np.float32)
        bias[list(self.places)] = np.where(seen, np.float32(0), np.float32(-np.inf))
        return Mask(low, tail, bias[:, None, :, None])


@dataclass(frozen=True)
class PrefillPiece:
    """Queries ``first`` to ``last`` (exclusive, positions in the input) of one row, and one head of
    keys."""

    member: int  # index of the row in the batch
    row: Row
    place: int  # of its values in the arrays
    head: int
    first: int
    last: int

    @property
    def cost(self) -> int:
        return (self.last - self.first) * (self.row.start + self.last)


Piece = RowsPiece | PrefillPiece


class How(NamedTuple):
    """How a layer attends, in addition to the lengths of rows."""

    window: int | None
    sinks: Array | None
    """(kv_heads, queries of a kv head, 1, 1): additional scores in softmax without a value."""
    softcap: float | None


def attend_singly(piece: RowsPiece, kept: Kept, asked: Array, out: Array, how: How) -> None:
    """Write the attention of rows with one token each. Queries are (tokens, kv_heads, queries of a
    kv head, 1, dim)."""
    low = 0 if how.window is None else max(0, min(piece.lengths) - how.window)
    keys, values = (array[piece.first : piece.last + 1, :, low : piece.length] for array in kept)
    queries = asked[piece.single_tokens, :, :, 0]
    gaps = len(keys) != len(queries)
    if gaps:  # rows in between attend too, but their output is not read
        queries = _spread(queries, piece, len(keys))
    few = queries.shape[2] <= FEW_QUERIES
    if few:
        scores: Array = np.matvec(keys[:, :, None], queries)
    else:  # many rows by few: OpenBLAS takes half as long as for few by many
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
    out[piece.single_tokens, :, :, 0] = result / total


def attend_together(piece: RowsPiece, kept: Kept, asked: Array, out: Array, how: How) -> None:
    """Write the attention of rows with several tokens, like `attend_singly`."""
    mask = piece.mask(how.window)
    rows = slice(piece.first, piece.last + 1)
    keys, values = (array[rows, :, mask.low : piece.length] for array in kept)
    given = asked[piece.tokens, :, :, 0]  # (members, width, kv_heads, queries of a kv head, dim)
    members, width, heads, group, _ = given.shape
    queries = given.swapaxes(1, 2).reshape(members, heads, width * group, -1)
    gaps = len(keys) != members
    if gaps:
        queries = _spread(queries, piece, len(keys))
    scores: Array = queries @ keys.swapaxes(2, 3)
    _cap(scores, how.softcap)
    by_token = scores.reshape(len(keys), heads, width, group, -1)
    by_token[..., mask.tail :] += mask.bias
    total = _softmax(by_token, None if how.sinks is None else how.sinks.swapaxes(1, 2))
    result: Array = (scores @ values).reshape(len(keys), heads, width, group, -1)
    result /= total
    if gaps:
        result = result[list(piece.places)]
    out[piece.tokens, :, :, 0] = result.swapaxes(1, 2)


def _spread(queries: Array, piece: RowsPiece, rows: int) -> Array:
    """Return ``queries`` (members, ...) at their positions among ``rows``."""
    spread: Array = np.zeros((rows, *queries.shape[1:]), np.float32)
    spread[list(piece.places)] = queries
    return spread


def attend_to_prefill(piece: PrefillPiece, kept: Kept, asked: Array, out: Array, how: How) -> None:
    """Write the attention of part of one row: ``asked`` is (kv_heads, queries of a kv head,
    width, dim)."""
    row, count, window = piece.row, piece.last - piece.first, how.window
    start, end = row.start + piece.first, row.start + piece.last
    low = 0 if window is None else max(0, start - window + 1)
    keys, values = (array[piece.place, piece.head, low:end] for array in kept)
    queries = asked[piece.head, :, piece.first : piece.last]
    scores = (queries.reshape(-1, queries.shape[-1]) @ keys.T).reshape(-1, count, end - low)
    _cap(scores, how.softcap)
    scores[:, :, start - low :] += ABOVE_DIAGONAL[:count, :count]
    if window is not None and end - low > window:
        scores += _outside(start - low, count, end - low, window)
    total = _softmax(scores, None if how.sinks is None else how.sinks[piece.head])
    result = scores @ values
    result /= total
    out[piece.head, :, piece.first : piece.last] = result


def _cap(scores: Array, softcap: float | None) -> None:
    """Apply a smooth limit to ``scores`` in place."""
    if softcap is not None:
        scores /= softcap
        np.tanh(scores, out=scores)
        scores *= softcap


def _softmax(scores: Array, sinks: Array | None) -> Array:
    """Turn ``scores`` into unnormalized weights in place, and return their sums.

    ``sinks`` is an additional score for each row of ``scores``, which counts in the sum but has no
    value."""
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    scores -= highest
    np.exp(scores, out=scores)
    total: Array = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - highest)
    return total


def _outside(first: int, count: int, keys: int, window: int) -> Any:
    """Return (count, keys): minus infinity if a key is ``window`` or more before its query."""
    queries = np.arange(first, first + count)[:, None]
    far = np.arange(keys)[None] <= queries - window
    return np.where(far, np.float32(-np.inf), np.float32(0))
