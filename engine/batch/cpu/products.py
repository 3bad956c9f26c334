"""Products of rows with weights, in NumPy arrays, in the way that was measured as fastest.

There are two libraries: the OpenBLAS in NumPy's wheels, and the library of MLX (`blas`), which
is MKL on Intel's processors and may be the slower one on others. Each takes very different
times for the same few rows, depending on which factor comes first. So all ways are tried on
the model's own weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.backend.blas import AS_IT_IS, ROW_MAJOR, TRANSPOSED, cblas_sgemm, cblas_sgemm_batch
from engine.backend.timing import shortest_s
from engine.cache.rounding import Array

Way = Callable[[Array, Array], Array]

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 256)
"""Numbers of rows that are measured."""
MOST_PADDED_ROWS = 16
"""Up to so many rows may be padded to a number that takes less time."""
LARGE_BYTES, ROWS_OF_LARGE = 64 << 20, 32
"""The size of a large weight, which is the last layer's, and the most rows that go through it."""
BYTES_AT_ONCE = 16 << 20
"""Bytes of weights that are multiplied in turn, so that not all of them stay in the cache."""
WORTH_IT = 0.92
"""Rows are padded more than needed if that takes at most this fraction of the time."""
LONG_S = 0.02
"""A product that takes longer is timed once."""


def _one_by_one(x: Array, weight: Array) -> Array:
    out = np.empty((len(x), len(weight)), np.float32)
    for one, target in zip(np.ascontiguousarray(x), out, strict=True):
        np.matmul(weight, one, out=target)
    return out


def _plain(x: Array, weight: Array) -> Array:
    return np.matmul(x, weight.T)  # type: ignore[no-any-return]


def _turned(x: Array, weight: Array) -> Array:
    return np.matmul(weight, x.T).T  # type: ignore[no-any-return]


class _Blas:
    """Products by ``sgemm``, a library's ``cblas_sgemm``."""

    def __init__(self, sgemm: Any) -> None:
        self._sgemm = sgemm

    def plain(self, x: Array, weight: Array) -> Array:
        return self._product(x, weight)

    def turned(self, x: Array, weight: Array) -> Array:
        return self._product(weight, x).T

    def _product(self, left: Array, right: Array) -> Array:
        """Return left @ right.T."""
        out = np.empty((len(left), len(right)), np.float32)
        left, left_order, left_stride = _operand(left, AS_IT_IS, TRANSPOSED)
        right, right_order, right_stride = _operand(right, TRANSPOSED, AS_IT_IS)
        self._sgemm(
            *(ROW_MAJOR, left_order, right_order, *out.shape, left.shape[1], 1.0),
            *(left.ctypes.data, left_stride, right.ctypes.data, right_stride),
            *(0.0, out.ctypes.data, len(right)),
        )
        return out


def _operand(x: Array, by_rows: int, by_columns: int) -> tuple[Array, int, int]:
    """Return ``x`` in a memory order that BLAS accepts, the name of the order, and its stride."""
    if x.flags.c_contiguous:
        return x, by_rows, x.shape[1]
    if x.flags.f_contiguous:
        return x, by_columns, x.shape[0]
    return np.ascontiguousarray(x), by_rows, x.shape[1]


class Library(NamedTuple):
    """A BLAS."""

    ways: tuple[Way, ...]  # of multiplying with it
    gemm_batch: Any | None = None  # its function for many products at once


def libraries() -> list[Library]:
    """Return the libraries of this process."""
    found = [Library((_one_by_one, _plain, _turned))]
    sgemm = cblas_sgemm()
    if sgemm is not None:
        blas = _Blas(sgemm)
        found.append(Library((blas.plain, blas.turned), cblas_sgemm_batch()))
    return found


class PaddedProduct(NamedTuple):
    """A product of ``rows`` rows, the last of them padding, by ``multiply``."""

    rows: int
    multiply: Way


class Products:
    """The best way for each shape of weight (out, in) and number of rows."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, ...], list[PaddedProduct]] = {}
        self._gemm_batches: list[Any | None] = []

    def measure(self, weights: Sequence[Array]) -> None:
        """Time all ways on a few of ``weights`` of each shape: a second or two."""
        available = libraries()
        every = [way for library in available for way in library.ways]
        count = Counter(weight.shape for weight in weights)
        seconds = {
            shape: _measured([weight for weight in weights if weight.shape == shape], every)
            for shape in count
        }
        for rows in range(1, ROWS[-1] + 1):
            # A pass uses one library, since the threads of the other would keep spinning.
            totals: list[tuple[float, Library, dict[tuple[int, ...], PaddedProduct]]] = []
            for library in available:
                best = {shape: _best(rows, library.ways, took) for shape, took in seconds.items()}
                total = sum(count[shape] * took for shape, (took, _) in best.items())
                choices = {shape: choice for shape, (_, choice) in best.items()}
                totals.append((total, library, choices))
            _, library, choices = min(totals, key=lambda each: each[0])
            self._gemm_batches.append(library.gemm_batch)
            for shape, choice in choices.items():
                self._choices.setdefault(shape, []).append(choice)

    def gemm_batch(self, rows: int) -> Any | None:
        """Return `blas.cblas_sgemm_batch` if its library computes a pass of ``rows`` rows."""
        return self._gemm_batches[min(rows, len(self._gemm_batches)) - 1]

    def __call__(self, x: Array, weight: Array) -> Array:
        """Return x @ weight.T for (rows, in) and (out, in), in memory by rows or by columns."""
        rows = len(x)
        choices = self._choices[weight.shape]
        padded, multiply = choices[min(rows, len(choices)) - 1]
        if padded <= rows:
            return multiply(x, weight)
        whole = np.zeros((padded, x.shape[1]), np.float32)
        whole[:rows] = x
        return multiply(whole, weight)[:rows]


def _measured(weights: Sequence[Array], ways: Sequence[Way]) -> dict[PaddedProduct, float]:
    """Return the seconds of a product, for each of ``ways`` and number of rows."""
    some = weights[: max(1, BYTES_AT_ONCE // weights[0].nbytes)]
    found: dict[PaddedProduct, float] = {}
    for rows in ROWS:
        if rows > ROWS_OF_LARGE and weights[0].nbytes > LARGE_BYTES:
            break
        x = np.random.default_rng(rows).standard_normal((rows, some[0].shape[1]), np.float32)
        for multiply in ways:
            if multiply is not _one_by_one or rows <= MOST_PADDED_ROWS:
                found[PaddedProduct(rows, multiply)] = _seconds(multiply, x, some)
    return found


def _seconds(multiply: Way, x: Array, weights: Sequence[Array]) -> float:
    def work() -> None:
        for weight in weights:
            multiply(x, weight)

    return shortest_s(work, LONG_S) / len(weights)


def _best(
    rows: int, ways: Sequence[Way], seconds: dict[PaddedProduct, float]
) -> tuple[float, PaddedProduct]:
    """Return the least time for ``rows`` rows, and the one of ``ways`` that takes it."""
    most = max(choice.rows for choice in seconds)
    nearest = min((count for count in ROWS if rows <= count <= most), default=most)

    def fastest(counts: Iterable[int]) -> tuple[float, PaddedProduct]:
        tried = (PaddedProduct(count, way) for count in counts for way in ways)
        return min(
            ((seconds[choice], choice) for choice in tried if choice in seconds),
            key=lambda each: each[0],
        )

    took, choice = fastest([nearest])
    if rows > MOST_PADDED_ROWS:
        return took, PaddedProduct(rows, choice.multiply)
    padded = fastest([count for count in ROWS if nearest <= count <= most])
    return padded if padded[0] < WORTH_IT * took else (took, choice)
