"""Linear layers on the CPU, with the fastest way of multiplying for each shape.

A BLAS takes very different times for the same product of a few rows, depending on the order of
the factors and on whether there is one row or two. The best way depends on the library, the
processor and the shape, so it is measured on the model's own weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from engine.backend.timing import shortest_s

Multiply = Callable[[mx.array, mx.array], mx.array]

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 128)
"""Numbers of rows that are measured. Up to `DECODE_ROWS`, others are padded to one of them."""
MOST_ROWS = 256
DECODE_ROWS = 32
"""The most rows that go through a large weight (the last layer's)."""
LARGE_BYTES = 64 << 20
BYTES_AT_ONCE = 48 << 20
"""Bytes of weights that are multiplied in turn, so that not all of them stay in the cache."""
WORTH_A_SECOND_LOOK_S = 0.01
WORTH_IT = 0.92
"""A way is chosen over MLX's own if it takes at most this fraction of its time."""


def _plain(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def _turned(x: mx.array, weight: mx.array) -> mx.array:
    return (weight @ x.T).T


class _Choice(NamedTuple):
    """A product of ``rows`` rows, the last of them padding, by ``multiply``."""

    rows: int
    multiply: Multiply


class Matmuls:
    """The best way for each shape of weight (out, in) and number of rows."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, int], dict[int, _Choice]] = {}

    def measure(self, model: nn.Module) -> None:
        """Time both ways on a few weights of each shape in ``model``: a second or two."""
        weights: dict[tuple[int, int], list[mx.array]] = {}
        for _, module in model.named_modules():
            if type(module) in (nn.Linear, nn.Embedding) and module.weight.dtype == mx.float32:
                weights.setdefault(module.weight.shape, []).append(module.weight)
        for shape, same in weights.items():
            some = same[: max(1, BYTES_AT_ONCE // same[0].nbytes)]
            mx.eval(some)
            most = DECODE_ROWS if same[0].nbytes > LARGE_BYTES else MOST_ROWS
            self._choices[shape] = _choices(some, most)

    def __call__(self, x: mx.array, weight: mx.array) -> mx.array:
        """Return x @ weight.T for (..., in) and (out, in)."""
        rows = x.size // x.shape[-1]
        choice = self._choices.get(weight.shape, {}).get(rows)
        if choice is None or x.dtype != mx.float32:
            return x @ weight.T
        flat = x.reshape(rows, -1)
        if choice.rows > rows:
            flat = mx.pad(flat, [(0, choice.rows - rows), (0, 0)])
        product = choice.multiply(flat, weight)
        return product[:rows].reshape(*x.shape[:-1], -1)


def _choices(weights: list[mx.array], most: int) -> dict[int, _Choice]:
    """Return choices by number of rows, if one is better than a plain product."""
    seconds: dict[_Choice, float] = {}
    for rows in ROWS:
        if rows <= most:
            x = mx.random.normal((rows, weights[0].shape[1]), key=mx.random.key(0))
            mx.eval(x)
            for way in (_plain, _turned):
                seconds[_Choice(rows, way)] = _seconds(way, x, weights)
    choices: dict[int, _Choice] = {}
    for rows in range(1, DECODE_ROWS + 1):
        larger = [choice for choice in seconds if choice.rows >= rows]
        best = min(larger, key=lambda choice: seconds[choice])
        same = _Choice(rows, _plain)
        if same not in seconds or seconds[best] < WORTH_IT * seconds[same]:
            choices[rows] = best
    many = {way: seconds.get(_Choice(ROWS[-1], way), 0.0) for way in (_plain, _turned)}
    if many[_turned] < WORTH_IT * many[_plain]:
        choices |= {rows: _Choice(rows, _turned) for rows in range(DECODE_ROWS + 1, MOST_ROWS + 1)}
    return choices


def _seconds(multiply: Multiply, x: mx.array, weights: list[mx.array]) -> float:
    def work() -> None:
        mx.eval([multiply(x, weight) for weight in weights])

    return shortest_s(work, WORTH_A_SECOND_LOOK_S)


def install(matmuls: Matmuls) -> None:
    """Make all linear layers, and tied embeddings as the last layer, use ``matmuls``."""

    def linear(self: Any, x: mx.array) -> mx.array:
        product = matmuls(x, self.weight)
        return product + self.bias if "bias" in self else product

    def as_linear(self: Any, x: mx.array) -> mx.array:
        return matmuls(x, self.weight)

    nn.Linear.__call__ = linear
    nn.Embedding.as_linear = as_linear
