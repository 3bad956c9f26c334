"""Adapters of rows, as parts of ONNX Runtime graphs.

Rows are grouped by adapter, and each group is multiplied by its own factors: two products for
all groups, which are padded to the same number of rows. A row therefore has the same bits
whatever else is in the batch (`docs/design/cpu.md`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from engine.adapters.checkpoint import LowRank, Shape
from engine.adapters.places import COLUMNS, columns_of
from engine.backend.graphs import Graph, Session
from engine.backend.threads import num_threads
from engine.cache.rounding import Array

SPARSE = 2
"""Factors are copied next to each other if the groups span more than this many times as many
places as they use."""
_TRIED_WIDTH = 1024
_TRIED_PLACES = (1, 0, 3, 3, 2)
_TRIED_SIZES = (1, 2, 3, 5, 8, 16, 17, 33, 64, 129)
_ROWS, _BACK = "adapter_rows", "adapter_back"


class Layer(NamedTuple):
    """A linear layer that supports adapters."""

    name: str
    shape: Shape
    places: int  # for adapters, in addition to place 0
    rank: int  # the highest rank of any adapter


class AdapterRows:
    """The tokens of a pass, grouped by adapter."""

    def __init__(self, places: Sequence[int], widths: Sequence[int]) -> None:
        """``places`` and ``widths`` are the adapter place and the number of tokens of each row
        of the pass."""
        of_tokens = np.repeat(places, widths)
        self.used: list[int] = sorted(set(places))
        first, last = self.used[0], self.used[-1]
        self._is_sparse = last - first + 1 > SPARSE * len(self.used)
        groups = self.used if self._is_sparse else range(first, last + 1)
        self._range = slice(first, last + 1)
        counts = np.array([np.count_nonzero(of_tokens == place) for place in groups])
        # A product of one row is computed differently, and so may be the last row of a thread.
        size = max(2, int(counts.max()))
        if size >= COLUMNS:
            size = max(size, 2 * num_threads())
        self._rows = np.zeros((len(groups), size), np.int64)
        self._back = np.zeros(len(of_tokens), np.int64)
        for number, place in enumerate(groups):
            members = np.flatnonzero(of_tokens == place)
            self._rows[number, : len(members)] = members
            self._back[members] = number * size + np.arange(len(members))

    def of(self, stack: Array) -> Array:
        """Return the factors of each group, selected from those of all places."""
        return stack[self.used] if self._is_sparse else stack[self._range]

    def feeds(self, padded: int) -> dict[str, Any]:
        """Return the indices that gather rows into groups and scatter them back, for a pass of
        ``padded`` tokens."""
        back = np.pad(self._back, (0, padded - len(self._back)))
        return {_ROWS: self._rows, _BACK: back}


class AdaptedLinear:
    """Linear layers with one input, side by side in one graph, and the factors of all places."""

    def __init__(self, graph: Graph, layers: Sequence[Layer]) -> None:
        self.rank = rank = layers[0].rank
        self._layers, self._places = layers, layers[0].places + 1
        self._width = min(columns_of(rank), COLUMNS)
        self._parts = columns_of(rank) // self._width  # inner columns of one layer
        self._inputs = layers[0].shape.inputs
        self._has = [False] * self._places
        prefix = f"adapter_{layers[0].name}"
        self._condition = graph.input(f"{prefix}_if", 1, dtype=np.bool_, by_name=True)
        groups = "adapter_groups"
        parts = self._parts * len(layers)
        self._down = graph.input(
            f"{prefix}_down", groups, parts, self._inputs, self._width, by_name=True
        )
        inner = self._parts * self._width
        self._ups = [
            graph.input(f"{prefix}_up_{i}", groups, inner, layer.shape.outputs, by_name=True)
            for i, layer in enumerate(layers)
        ]

    @cached_property
    def _stacks(self) -> tuple[Array, list[Array]]:
        """The factors. Their memory is allocated with the first adapter that has any."""
        parts = self._parts * len(self._layers)
        down = np.zeros((self._places, parts, self._inputs, self._width), np.float32)
        inner = self._parts * self._width
        outputs = [layer.shape.outputs for layer in self._layers]
        return down, [np.zeros((self._places, inner, out), np.float32) for out in outputs]

    def add(self, graph: Graph, x: str, out: str) -> str:
        """Return ``out`` plus the adapters' part for the inputs ``x`` (rows, in)."""
        if not graph.has_input(_ROWS):
            graph.input(_ROWS, "adapter_groups", "adapter_size", dtype=np.int64, by_name=True)
            graph.input(_BACK, "rows", dtype=np.int64, by_name=True)

        def added() -> str:
            grouped = graph.node("Gather", x, _ROWS)  # (groups, size, in)
            grouped = graph.node("Unsqueeze", grouped, graph.integers(1))
            inner = graph.node("MatMul", grouped, self._down)  # (groups, parts, size, width)
            layers = len(self._layers)
            each = [inner]
            if layers > 1:
                each = graph.nodes("Split", inner, outputs=layers, axis=1, num_outputs=layers)
            found = [
                graph.node("MatMul", self._joined(graph, one), up)
                for one, up in zip(each, self._ups, strict=True)
            ]
            whole = found[0] if layers == 1 else graph.node("Concat", *found, axis=2)
            width = sum(layer.shape.outputs for layer in self._layers)
            flat = graph.node("Reshape", whole, graph.integers(-1, width))
            return graph.node("Add", out, graph.node("Gather", flat, _BACK))

        return graph.choose(self._condition, added, out)

    def _joined(self, graph: Graph, inner: str) -> str:
        """Return the inner columns of one layer, (groups, size, rank)."""
        if self._parts == 1:
            return graph.node("Squeeze", inner, graph.integers(1))
        turned = graph.node("Transpose", inner, perm=[0, 2, 1, 3])
        return graph.node("Reshape", turned, graph.integers(0, 0, -1))

    def put(self, place: int, factors: Mapping[str, LowRank]) -> None:
        own = [factors.get(layer.name) for layer in self._layers]
        had, self._has[place] = self._has[place], any(each is not None for each in own)
        if not had and not self._has[place]:
            return
        down, ups = self._stacks
        down[place] = 0
        for number, each in enumerate(own):
            ups[number][place] = 0
            if each is None:
                continue
            rank = each.down.shape[1]
            ups[number][place, :rank] = each.up
            for part in range(self._parts):
                some = each.down[:, part * self._width : (part + 1) * self._width]
                down[place, number * self._parts + part, :, : some.shape[1]] = some

    def feeds(self, rows: AdapterRows | None) -> Iterator[tuple[str, Any]]:
        if rows is None or not any(self._has[place] for place in rows.used):
            yield from self._nothing.items()
            return
        down, ups = self._stacks
        yield self._condition, _YES
        yield self._down, rows.of(down)
        for name, up in zip(self._ups, ups, strict=True):
            yield name, rows.of(up)

    @cached_property
    def _nothing(self) -> dict[str, Any]:
        """Placeholder inputs, which are not read."""
        parts, inner = self._parts * len(self._layers), self._parts * self._width
        found: dict[str, Any] = {self._condition: np.array([False])}
        found[self._down] = np.zeros((0, parts, self._inputs, self._width), np.float32)
        for name, layer in zip(self._ups, self._layers, strict=True):
            found[name] = np.zeros((0, inner, layer.shape.outputs), np.float32)
        return found


_YES = np.array([True])
_NO_ROWS = np.zeros((0, 0), np.int64)


class DecoderStore:
    """The factors of the linear layers of a model that ONNX Runtime computes."""

    def __init__(self, stretches: Sequence[Session]) -> None:
        self._graphs: list[Sequence[AdaptedLinear]] = [each.parts for each in stretches]

    @property
    def same_bits(self) -> bool:
        """Whether a row has the same bits whatever other rows and adapters are in the batch."""
        ranks = {linear.rank for graph in self._graphs for linear in graph}
        return all(keeps_bits(rank) for rank in ranks)

    def put(self, place: int, layers: Mapping[str, LowRank]) -> None:
        for graph in self._graphs:
            for linear in graph:
                linear.put(place, layers)

    def feeds(self, number: int, rows: AdapterRows | None, padded: int) -> dict[str, Any]:
        """Return the inputs of stretch ``number`` for a pass of ``padded`` tokens."""
        linears = self._graphs[number]
        if not linears:
            return {}
        nothing = {_ROWS: _NO_ROWS, _BACK: np.zeros(padded, np.int64)}
        found: dict[str, Any] = nothing if rows is None else rows.feeds(padded)
        for linear in linears:
            found.update(linear.feeds(rows))
        return found


@cache
def keeps_bits(rank: int) -> bool:
    """Test on this processor whether a row has the same bits alone and among others, with
    adapters of ``rank``."""
    random = np.random.default_rng(0)
    shape, places = Shape(_TRIED_WIDTH, _TRIED_WIDTH), max(_TRIED_PLACES)
    layers = [Layer(f"tried {number}", shape, places, rank) for number in range(2)]
    graph = Graph()
    x = graph.input("x", "rows", shape.inputs)
    part = AdaptedLinear(graph, layers)
    out = graph.input("out", "rows", 2 * shape.outputs)
    graph.output(part.add(graph, x, out), "rows", 2 * shape.outputs)
    session = graph.session()
    for place in range(1, places + 1):
        part.put(place, {layer.name: _random_factors(random, layer) for layer in layers})
    rows = random.standard_normal((sum(_TRIED_SIZES), shape.inputs), np.float32)

    def computed(first: int, of_rows: Sequence[int]) -> Array:
        adapters, count = AdapterRows(of_rows, [1] * len(of_rows)), len(of_rows)
        named = {**adapters.feeds(count), **dict(part.feeds(adapters))}
        before = np.zeros((count, 2 * shape.outputs), np.float32)
        found: Array = session(rows[first : first + count], before, named=named)[0]
        return found

    for size in _TRIED_SIZES:
        mixed = [_TRIED_PLACES[number % len(_TRIED_PLACES)] for number in range(size)]
        together = computed(0, mixed)
        for number in {0, size // 2, size - 1}:
            place = mixed[number]
            alone = computed(number, [place])[0] if place else together[number] * 0
            if not np.array_equal(together[number], alone):
                return False
            if place and not np.array_equal(computed(number, [place] * size)[0], alone):
                return False
    return True


def _random_factors(random: np.random.Generator, layer: Layer) -> LowRank:
    down = random.standard_normal((layer.shape.inputs, layer.rank), np.float32)
    return LowRank(down, random.standard_normal((layer.rank, layer.shape.outputs), np.float32))
