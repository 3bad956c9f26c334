"""Products of rows with weights, in NumPy arrays, in the way that was measured fastest.

There are two libraries: the OpenBLAS in NumPy's wheels, and the one that MLX computes with
(`blas`), which on Intel's processors is MKL and on others may be the slower one. Each takes
very different times for the same few rows, depending on which factor comes first. So all
ways are tried, on the model's own weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.backend.blas import (
    AS_IT_IS,
    ROW_MAJOR,
    TRANSPOSED,
    cblas_sgemm,
    cblas_sgemm_batch,
)
from engine.backend.timing import shortest_s
from engine.cache.rounding import Array

Way = Callable[[Array, Array], Array]

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 256)
"""Numbers of rows that are measured."""
MOST_PADDED_ROWS = 16
"""So many rows may be padded to a number that takes less time."""
LARGE_BYTES, ROWS_OF_LARGE = 64 << 20, 32
"""So many rows go through a large weight, which is the last layer's, at most."""
BYTES_AT_ONCE = 16 << 20
"""Of weights that are multiplied in a row, so that they do not all stay in the cache."""
WORTH_IT = 0.92
"""More padding than there has to be must take at most this part of the time without."""
LONG_S = 0.02
"""What takes longer is tried once."""


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
    """The same by ``sgemm``, a library's ``cblas_sgemm``."""

    def __init__(self, sgemm: Any) -> None:
        self._sgemm = sgemm

    def plain(self, x: Array, weight: Array) -> Array:
        return self._product(x, weight)

    def turned(self, x: Array, weight: Array) -> Array:
        return self._product(weight, x).T

    def _product(self, left: Array, right: Array) -> Array:
        """left @ right.T"""
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
    """``x`` in a memory order that BLAS takes, the name of that order, and its stride."""
    if x.flags.c_contiguous:
        return x, by_rows, x.shape[1]
    if x.flags.f_contiguous:
        return x, by_columns, x.shape[0]
    return np.ascontiguousarray(x), by_rows, x.shape[1]


class Library(NamedTuple):
    """``ways`` to multiply with it, and what it has for many products at once."""

    ways: tuple[Way, ...]
    gemm_batch: Any | None = None


def libraries() -> list[Library]:
    """Those that there are here."""
    found = [Library((_one_by_one, _plain, _turned))]
    sgemm = cblas_sgemm()
    if sgemm is not None:
        blas = _Blas(sgemm)
        found.append(Library((blas.plain, blas.turned), cblas_sgemm_batch()))
    return found


class PaddedProduct(NamedTuple):
    """Multiply ``rows`` rows, the last of them padding, in the way ``multiply``."""

    rows: int
    multiply: Way


class Products:
    """The best way for each shape of weight (out, in) and number of rows."""

    def __init__(self) -> None:
        self._choices: dict[tuple[int, ...], list[PaddedProduct]] = {}
        self._gemm_batches: list[Any | None] = []

    def measure(self, weights: Sequence[Array]) -> None:
        """Tries all ways on a few of ``weights`` of each shape: a second or two."""
        available = libraries()
        every = [way for library in available for way in library.ways]
        count = Counter(weight.shape for weight in weights)
        seconds = {
            shape: _measured([weight for weight in weights if weight.shape == shape], every)
            for shape in count
        }
        for rows in range(1, ROWS[-1] + 1):
            # All of a pass in one library: the threads of the other one would not rest at once.
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
        """`blas.cblas_sgemm_batch`, where a pass of so many rows is computed by that library."""
        return self._gemm_batches[min(rows, len(self._gemm_batches)) - 1]

    def __call__(self, x: Array, weight: Array) -> Array:
        """x @ weight.T of (rows, in) and (out, in); in memory by rows or by columns."""
        rows = len(x)
        choices = self._choices[weight.shape]
        padded, multiply = choices[min(rows, len(choices)) - 1]
        if padded <= rows:
            return multiply(x, weight)
        whole = np.zeros((padded, x.shape[1]), np.float32)
        whole[:rows] = x
        return multiply(whole, weight)[:rows]


def _measured(weights: Sequence[Array], ways: Sequence[Way]) -> dict[PaddedProduct, float]:
    """Seconds of a product, for each of ``ways`` and number of rows."""
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
    """The one of ``ways`` that takes the least time for ``rows`` rows, and the time."""
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
