"""Products of rows with weights: all ways give the same product."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.backend.blas import load_fast_blas
from engine.batch.cpu.products import MOST_PADDED_ROWS, ROWS, Library, Products, libraries
from engine.cache.rounding import Array

WIDTH, COUNT = 40, 24
WAYS = [way for library in libraries() for way in library.ways]


def some(rows: int, columns: int, order: str = "C") -> Array:
    drawn = np.random.default_rng(rows).standard_normal((rows, columns), np.float32)
    if order == "strided":
        return np.repeat(drawn, 2, axis=1)[:, ::2]
    return np.asarray(drawn, order="F" if order == "F" else "C")


def assert_product(found: Array, x: Array, weight: Array) -> None:
    assert found.shape == (len(x), len(weight))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight.T, atol=1e-4)


@pytest.mark.skipif(load_fast_blas() is None, reason="no BLAS but NumPy's")
def test_both_libraries_are_found() -> None:
    assert len(libraries()) == 2


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__qualname__)
def test_every_way_gives_the_product(way: Callable[[Array, Array], Array], order: str) -> None:
    weight = some(COUNT, WIDTH)
    for rows in (1, 2, 5, 70):
        x = some(rows, WIDTH, order)
        assert_product(way(x, weight), x, weight)


@pytest.mark.parametrize("order", ["C", "F"])
def test_every_number_of_rows_is_multiplied(order: str) -> None:
    weights = [some(COUNT, WIDTH), some(COUNT, WIDTH), some(WIDTH, COUNT)]
    products = Products()
    products.measure(weights)
    for weight in weights[1:]:
        for rows in (*range(1, MOST_PADDED_ROWS + 2), *ROWS, ROWS[-1] + 1, 700):
            x = some(rows, weight.shape[1], order)
            assert_product(products(x, weight), x, weight)


def test_the_fastest_way_is_taken_and_one_library_for_all_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times are given: of ways of two libraries, one faster with padding."""
    took: list[Callable[[int, bool], float]] = [
        lambda rows, large: 1.0,
        lambda rows, large: 3.0 if large or rows % 8 else 0.5,
        lambda rows, large: 0.4 if large else 2.0,
    ]
    calls: list[tuple[int, int, bool]] = []  # the way, its rows and whether the weight is large

    def noted(number: int) -> Callable[[Array, Array], Array]:
        def multiply(x: Array, weight: Array) -> Array:
            calls.append((number, len(x), len(weight) == COUNT))
            return WAYS[number](x, weight)

        return multiply

    def seconds(work: Callable[[], object], long_s: float) -> float:
        calls.clear()
        work()
        return sum(took[number](rows, large) for number, rows, large in calls)

    first, second, third = (noted(number) for number in range(3))
    two = [Library((first, second)), Library((third,), "many at once")]
    monkeypatch.setattr("engine.batch.cpu.products.libraries", lambda: two)
    monkeypatch.setattr("engine.batch.cpu.products.shortest_s", seconds)
    large, small = some(COUNT, WIDTH), some(8, WIDTH)

    def chosen(*weights: Array) -> list[tuple[int, int, object]]:
        products = Products()
        products.measure(weights)
        found = []
        for rows in (3, 8):
            products(some(rows, WIDTH), small)
            way, padded, _ = calls[-1]
            found.append((padded, way, products.gemm_batch(rows)))
        return found

    assert chosen(small) == [(8, 1, None), (8, 1, None)]
    assert chosen(small, large) == [(8, 1, None), (8, 1, None)]
    assert chosen(small, large, large, large) == [(3, 2, "many at once"), (8, 2, "many at once")]
