"""Tables for rotary positions, computed by the model's own modules."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.cpu.onnx.graphs import Unsupported
from engine.cpu.pages.rounding import Array

FIRST_TABLE = 2048
"""Positions in the first table. One that is too short grows by half, at least by so many."""
_FAR = 1000
_CHECKED = (0, 1, 13, 400, 5_000)
_TOLERANCE = 1e-4


class Rotary:
    """The rotation of heads of ``dim`` elements by the module ``rope``.

    A rotation is linear, so its result for the first element of each pair determines a position.
    Pairs are adjacent elements, or elements at the same index of both halves. Elements beyond
    ``turned`` are unchanged. Raises `Unsupported` if ``rope`` does anything else.
    """

    def __init__(self, rope: Any, dim: int) -> None:
        self._rope, self._dim = rope, dim
        # Beyond this, one of mlx-lm's modules rotates all positions differently.
        self._limit = getattr(rope, "max_position_embeddings", math.inf)
        changed = np.flatnonzero(self._of_module(np.ones(dim, np.float32), _FAR) != 1)
        self.turned = int(changed[-1]) + 1 if changed.size else 0
        """How many elements are rotated: an even number, 0 if the layer has no positions."""
        if self.turned % 2:
            raise Unsupported("its kind of positions is not supported")
        one = self._of_module(np.eye(1, dim, dtype=np.float32)[0], 1)
        self.neighbours = bool(self.turned and one[1])
        self._tables: tuple[Array, Array] = (np.empty((0, self.turned // 2), np.float32),) * 2
        self._reach(int(min(FIRST_TABLE, self._limit)))
        self._check()

    def tables(self, positions: NDArray[np.int64]) -> tuple[Array, Array]:
        """Return cosines and sines of ``positions`` (tokens,): (tokens, turned / 2) each."""
        self._reach(int(positions.max()) + 1)
        return self._tables[0][positions], self._tables[1][positions]

    def same_as(self, rope: Any) -> bool:
        """Return whether ``rope`` rotates as this one does."""
        x = np.random.default_rng(0).standard_normal(self._dim, np.float32)
        return all(
            np.array_equal(self._of_module(x, at, rope), self._of_module(x, at)) for at in _CHECKED
        )

    def _of_module(self, x: Array, position: int, rope: Any = None) -> Array:
        """Return ``x`` (dim,) as the module rotates it."""
        rope = self._rope if rope is None else rope
        rotated = rope(mx.array(x).reshape(1, 1, 1, -1), offset=position)
        return np.asarray(rotated).reshape(-1)

    def _check(self) -> None:
        x = np.random.default_rng(0).standard_normal(self._dim, np.float32)
        half = self.turned // 2
        for position in (each for each in _CHECKED if each < self._limit):
            (cosines,), (sines,) = self.tables(np.array([position]))
            ours, pairs = x.copy(), x[: self.turned]
            pairs = pairs.reshape(half, 2).T if self.neighbours else pairs.reshape(2, half)
            turned = np.stack(
                [pairs[0] * cosines - pairs[1] * sines, pairs[0] * sines + pairs[1] * cosines]
            )
            ours[: self.turned] = (turned.T if self.neighbours else turned).reshape(-1)
            if not np.allclose(ours, self._of_module(x, position), _TOLERANCE, _TOLERANCE):
                raise Unsupported("its kind of positions is not supported")

    def _reach(self, length: int) -> None:
        if length <= (known := len(self._tables[0])):
            return
        half = self.turned // 2
        length = max(length, int(min(known + max(known // 2, FIRST_TABLE), self._limit))) - known
        first = np.zeros(self._dim, np.float32)
        first[slice(0, self.turned, 2) if self.neighbours else slice(0, half)] = 1
        rotated = self._rope(
            mx.broadcast_to(mx.array(first), (1, 1, length, self._dim)), offset=known
        )
        pairs = np.asarray(rotated)[0, 0, :, : self.turned]
        pairs = pairs.reshape((length, half, 2) if self.neighbours else (length, 2, half))
        axis = 2 if self.neighbours else 1
        more = pairs.take(0, axis), pairs.take(1, axis)
        cosines, sines = map(np.concatenate, zip(self._tables, more, strict=True))
        self._tables = cosines, sines
