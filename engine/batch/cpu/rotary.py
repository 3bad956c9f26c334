"""Rotary positions in NumPy, from tables that the model's own module computes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

FIRST_TABLE = 2048
"""Positions of the first table, which doubles when it is too short."""
_CHECKED = (0, 1, 13, 400, 5_000)
_TOLERANCE = 1e-4


class Unsupported(Exception):
    """The model cannot be computed here. The message says why."""


class Rotary:
    """Rotates (tokens, heads, dim) as the module ``rope`` does.

    A rotation is linear, so its result for the first element of each pair determines a position.
    Pairs are neighbours, or the elements at the same place of both halves. Raises `Unsupported`
    if ``rope`` does anything else.
    """

    def __init__(self, rope: Any, dim: int) -> None:
        self._rope, self._dim = rope, dim
        one = np.asarray(rope(mx.eye(dim)[:1].reshape(1, 1, 1, dim), offset=1)).reshape(-1)
        self._neighbours = bool(one[1])
        self._table = np.empty((0, dim // 2), np.complex64)
        self._reach(FIRST_TABLE)
        self.check(rope)

    def __call__(self, x: Any, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return ``x`` with each token rotated to its position in ``positions`` (tokens,)."""
        self._reach(int(positions.max()) + 1)
        turns = self._table[positions][:, None]
        if self._neighbours:
            pairs = np.ascontiguousarray(x).view(np.complex64)
            neighbours: NDArray[np.float32] = (pairs * turns).view(np.float32)
            return neighbours
        half = self._dim // 2
        left, right = x[..., :half], x[..., half:]
        out = np.empty(x.shape, np.float32)
        np.multiply(left, turns.real, out=out[..., :half])
        out[..., :half] -= right * turns.imag
        np.multiply(right, turns.real, out=out[..., half:])
        out[..., half:] += left * turns.imag
        return out

    def check(self, rope: Any) -> None:
        """Raise `Unsupported` if ``rope`` computes anything else."""
        x = mx.random.normal((1, 1, 1, self._dim), key=mx.random.key(0))
        for position in _CHECKED:
            theirs = np.asarray(rope(x, offset=position)).reshape(1, 1, -1)
            ours = self(np.asarray(x).reshape(1, 1, -1), np.array([position]))
            if not np.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise Unsupported("its positions are of another kind")

    def _reach(self, length: int) -> None:
        if length <= len(self._table):
            return
        length = max(length, 2 * len(self._table))
        first = np.zeros(self._dim, np.float32)
        first[slice(0, None, 2) if self._neighbours else slice(0, self._dim // 2)] = 1
        turned = self._rope(mx.broadcast_to(mx.array(first), (1, 1, length, self._dim)), offset=0)
        pairs = np.asarray(turned.astype(mx.float32))[0, 0].reshape(
            (length, -1, 2) if self._neighbours else (length, 2, -1)
        )
        axis = 2 if self._neighbours else 1
        self._table = pairs.take(0, axis) + np.complex64(1j) * pairs.take(1, axis)
