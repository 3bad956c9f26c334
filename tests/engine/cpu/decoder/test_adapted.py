"""Adapters of rows in graphs: products of the ranks that there are, and the same bits with all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.adapters.checkpoint import LowRank, Shape
from engine.cpu.decoder.adapted import AdaptedLinear, AdapterRows, DecoderStore, Layer
from engine.cpu.onnx.graphs import Graph
from engine.cpu.pages.rounding import Array

SHAPES = {"q": Shape(40, 24), "k": Shape(40, 8)}
PLACES, TOKENS = 3, 5
CLOSE = 1e-4


class TwoLayers:
    """Two layers with one input, as a stretch of a model has them."""

    def __init__(self, max_rank: int) -> None:
        layers = [Layer(name, shape, PLACES, max_rank) for name, shape in SHAPES.items()]
        graph, width = Graph(), sum(shape.outputs for shape in SHAPES.values())
        x, out = graph.input("x", "rows", 40), graph.input("out", "rows", width)
        self.part = AdaptedLinear(graph, layers)
        graph.parts.append(self.part)
        graph.output(self.part.add(graph, x, out), "rows", width)
        self._session = graph.session()
        self.store = DecoderStore([self._session])
        self.random = np.random.default_rng(0)
        self.x = self.random.standard_normal((TOKENS, 40), np.float32)
        self._before = self.random.standard_normal((TOKENS, width), np.float32)

    def adapter(self, rank: int, names: Sequence[str] = ("q", "k")) -> dict[str, LowRank]:
        draw = self.random.standard_normal
        return {
            name: LowRank(
                draw((SHAPES[name].inputs, rank), np.float32),
                draw((rank, SHAPES[name].outputs), np.float32),
            )
            for name in names
        }

    def added(self, *places: int) -> Array:
        """Return what the adapters in ``places`` add to each token."""
        rows = AdapterRows(places, [1] * TOKENS) if any(places) else None
        named = self.store.feeds(0, rows, TOKENS)
        found: Array = self._session(self.x, self._before, named=named)[0]
        return found

    def expected(self, *adapters: dict[str, LowRank]) -> Array:
        rows = []
        for x, before, adapter in zip(self.x, self._before, adapters, strict=True):
            parts = [
                x @ adapter[name].down @ adapter[name].up
                if name in adapter
                else np.zeros(shape.outputs, np.float32)
                for name, shape in SHAPES.items()
            ]
            rows.append(before + np.concatenate(parts))
        return np.stack(rows)


def is_close(found: Any, expected: Any) -> bool:
    return bool(np.abs(found - expected).max() < CLOSE)


@pytest.mark.parametrize("max_rank", [16, 48])
def test_an_adapter_keeps_its_bits_when_one_of_a_higher_rank_comes_and_goes(max_rank: int) -> None:
    tried = TwoLayers(max_rank)
    few = tried.adapter(3)
    none: dict[str, LowRank] = {}
    many = tried.adapter(max_rank, ["q"])
    tried.store.put(1, few)
    alone = tried.added(1, 1, 0, 1, 0)
    assert is_close(alone, tried.expected(few, few, none, few, none))
    tried.store.put(2, many)
    mixed = tried.added(1, 2, 0, 1, 2)
    assert is_close(mixed, tried.expected(few, many, none, few, many))
    assert np.array_equal(mixed[[0, 2, 3]], alone[[0, 2, 3]])
    tried.store.put(2, few)
    assert np.array_equal(tried.added(1, 2, 0, 1, 0), alone)


def test_products_have_the_columns_of_the_highest_rank_in_any_place() -> None:
    tried = TwoLayers(16)

    def size() -> int:
        rows = AdapterRows([1] * TOKENS, [1] * TOKENS)
        return sum(each.nbytes for each in tried.store.feeds(0, rows, TOKENS).values())

    tried.store.put(1, tried.adapter(4))
    small = size()
    tried.store.put(2, tried.adapter(16))
    assert size() > 3 * small
    tried.store.put(2, tried.adapter(4))
    assert size() == small


def test_a_pass_after_an_adapter_was_replaced_reads_the_new_one() -> None:
    tried = TwoLayers(16)
    first, second = tried.adapter(4), tried.adapter(4)
    tried.store.put(3, first)
    places = 3, 0, 3, 0, 3
    before = tried.added(*places)
    assert np.array_equal(tried.added(*places), before)  # the inputs of the last pass are kept
    tried.store.put(3, second)
    found = tried.added(*places)
    assert is_close(found, tried.expected(second, {}, second, {}, second))
    assert np.array_equal(found[1], before[1])
