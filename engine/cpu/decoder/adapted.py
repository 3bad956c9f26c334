"""Adapters of rows, as parts of ONNX Runtime graphs.

Rows are grouped by adapter, and each group is multiplied by its own factors: two products for
all groups, which are padded to the same number of rows. A row therefore has the same bits
whatever else is in the batch (`docs/design/cpu.md`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from engine.adapters.checkpoint import LowRank, Shape
from engine.adapters.places import COLUMNS, columns_of
from engine.backend.threads import num_threads
from engine.cpu.onnx.graphs import Graph, Session
from engine.cpu.pages.rounding import Array

SPARSE = 2
"""Factors are copied next to each other if the groups span more than this many times as many
places as they use."""
MAX_KEPT = 2
"""Passes whose inputs are kept: decode steps run between the layers of a prompt."""
_TRIED_WIDTH = 1024
_TRIED_PLACES = (1, 0, 3, 3, 2)
_TRIED_RANKS = (1, 2, 5, 8, 16, 64)
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
        self.key = tuple(places), tuple(widths)
        of_tokens = np.repeat(places, widths)
        self.used: list[int] = sorted(set(places))
        first, last = self.used[0], self.used[-1]
        self.is_sparse = last - first + 1 > SPARSE * len(self.used)
        groups = self.used if self.is_sparse else range(first, last + 1)
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
        return stack[self.used] if self.is_sparse else stack[self._range]

    def feeds(self, padded: int) -> dict[str, Any]:
        """Return the indices that gather rows into groups and scatter them back, for a pass of
        ``padded`` tokens."""
        back = np.pad(self._back, (0, padded - len(self._back)))
        return {_ROWS: self._rows, _BACK: back}


class _Stacks:
    """The factors of all places for linear layers with one input. Each layer has ``columns`` inner
    columns, those of the highest rank in any place: more would only be zeros that take time."""

    def __init__(self, layers: Sequence[Layer], columns: int) -> None:
        self.columns = columns
        self._width = min(columns, COLUMNS)
        self._parts = columns // max(self._width, 1)  # of one layer
        places, inputs = layers[0].places + 1, layers[0].shape.inputs
        shape = places, len(layers) * self._parts, inputs, self._width
        self.down: Array = np.zeros(shape, np.float32)
        self.ups: list[Array] = [
            np.zeros((places, columns, layer.shape.outputs), np.float32) for layer in layers
        ]

    def put(self, place: int, number: int, factors: LowRank | None) -> None:
        """Replace the factors of a layer."""
        down, up = self._downs_of(place, number), self.ups[number][place]
        down[:], up[:] = 0, 0
        if factors is None:
            return
        rank = len(factors.up)
        up[:rank] = factors.up
        for part, first in zip(down, range(0, rank, self._width), strict=False):
            some = factors.down[:, first : first + self._width]
            part[:, : some.shape[1]] = some

    def of(self, place: int, number: int) -> LowRank:
        """Return the factors of a layer, with all columns."""
        down = self._downs_of(place, number)
        return LowRank(np.concatenate([*down], axis=1), self.ups[number][place])

    def _downs_of(self, place: int, number: int) -> Array:
        """Return the first factor of a layer: (parts, in, width)."""
        return self.down[place, number * self._parts : (number + 1) * self._parts]


class AdaptedLinear:
    """Linear layers with one input, side by side in one graph, and the factors of all places."""

    def __init__(self, graph: Graph, layers: Sequence[Layer]) -> None:
        self.rank = layers[0].rank
        self._layers = layers
        self._ranks = [0] * (layers[0].places + 1)  # of the adapter in each place
        self._stacks = _Stacks(layers, 0)
        prefix = f"adapter_{layers[0].name}"
        self._condition = graph.input(f"{prefix}_if", 1, dtype=np.bool_, by_name=True)
        groups, width, inner = "adapter_groups", f"{prefix}_width", f"{prefix}_columns"
        sizes = groups, f"{prefix}_parts", layers[0].shape.inputs, width
        self._down = graph.input(f"{prefix}_down", *sizes, by_name=True)
        self._ups = [
            graph.input(f"{prefix}_up_{i}", groups, inner, layer.shape.outputs, by_name=True)
            for i, layer in enumerate(layers)
        ]

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
        """Return the inner columns of one layer, (groups, size, columns)."""
        if self.rank <= COLUMNS:
            return graph.node("Squeeze", inner, graph.integers(1))
        turned = graph.node("Transpose", inner, perm=[0, 2, 1, 3])
        return graph.node("Reshape", turned, graph.integers(0, 0, -1))

    def put(self, place: int, factors: Mapping[str, LowRank]) -> None:
        own = [factors.get(layer.name) for layer in self._layers]
        had, ranks = self._ranks[place], self._ranks.copy()
        ranks[place] = max(len(each.up) if each is not None else 0 for each in own)
        self._fit(ranks)
        if had or ranks[place]:
            for number, each in enumerate(own):
                self._stacks.put(place, number, each)

    def _fit(self, ranks: list[int]) -> None:
        """Allocate stacks with other columns if these ``ranks`` of places need them."""
        before, columns = self._stacks, columns_of(max(ranks)) if any(ranks) else 0
        if columns != before.columns:
            stacks = _Stacks(self._layers, columns)
            for place, rank in enumerate(self._ranks):
                kept = min(rank, ranks[place])
                for number in range(len(self._layers) if kept else 0):
                    down, up = before.of(place, number)
                    stacks.put(place, number, LowRank(down[:, :kept], up[:kept]))
            self._stacks = stacks
        self._ranks = ranks

    def feeds(self, rows: AdapterRows | None) -> Iterator[tuple[str, Any]]:
        if rows is None or not any(self._ranks[place] for place in rows.used):
            yield from self._nothing.items()
            return
        yield self._condition, _YES
        yield self._down, rows.of(self._stacks.down)
        for name, up in zip(self._ups, self._stacks.ups, strict=True):
            yield name, rows.of(up)

    @cached_property
    def _nothing(self) -> dict[str, Any]:
        """Placeholder inputs, which are not read."""
        empty = _Stacks(self._layers, 0)
        found: dict[str, Any] = {self._condition: np.array([False]), self._down: empty.down[:0]}
        return found | {name: up[:0] for name, up in zip(self._ups, empty.ups, strict=True)}


_YES = np.array([True])
_NO_ROWS = np.zeros((0, 0), np.int64)


class DecoderStore:
    """The factors of the linear layers of a model that ONNX Runtime computes."""

    def __init__(self, stretches: Sequence[Session]) -> None:
        self._graphs: list[Sequence[AdaptedLinear]] = [each.parts for each in stretches]
        self._nothing = [self._made(linears, None, 0) for linears in self._graphs]
        self._kept: dict[Any, dict[int, dict[str, Any]]] = {}
        """The inputs of stretches in the last passes with adapters. Steps of the same rows have the
        same ones, and making them takes as long as some of the products."""

    @property
    def same_bits(self) -> bool:
        """Whether a row has the same bits whatever other rows and adapters are in the batch."""
        ranks = {linear.rank for graph in self._graphs for linear in graph}
        return all(keeps_bits(rank) for rank in ranks)

    def put(self, place: int, layers: Mapping[str, LowRank]) -> None:
        self._kept.clear()
        for graph in self._graphs:
            for linear in graph:
                linear.put(place, layers)

    def feeds(self, number: int, rows: AdapterRows | None, padded: int) -> dict[str, Any]:
        """Return the inputs of stretch ``number`` for a pass of ``padded`` tokens."""
        if rows is None:
            return self._nothing[number]
        if rows.is_sparse:  # these inputs are copies: one stretch at a time
            return self._made(self._graphs[number], rows, padded)
        key = *rows.key, padded
        kept = self._kept.get(key)
        if kept is None:
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            kept = self._kept[key] = {}
        if number not in kept:
            kept[number] = self._made(self._graphs[number], rows, padded)
        return kept[number]

    def _made(
        self, linears: Sequence[AdaptedLinear], rows: AdapterRows | None, padded: int
    ) -> dict[str, Any]:
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
    adapters of ``rank``, and beside adapters of a higher rank."""
    tried = _Tried(rank)
    tried.fill(range(1, tried.places + 1), rank)
    return all(map(tried.keeps_among, _TRIED_SIZES)) and all(
        tried.keeps_beside(less, size) for less in _TRIED_RANKS if less < rank for size in (1, 17)
    )


class _Tried:
    """Two layers with adapters, to compare the bits of rows."""

    def __init__(self, rank: int) -> None:
        self.places = max(_TRIED_PLACES)
        self._rank, self._random = rank, np.random.default_rng(0)
        shape = Shape(_TRIED_WIDTH, _TRIED_WIDTH)
        self._layers = [Layer(f"tried {number}", shape, self.places, rank) for number in range(2)]
        graph, outputs = Graph(), 2 * shape.outputs
        x, out = graph.input("x", "rows", shape.inputs), graph.input("out", "rows", outputs)
        self._part = AdaptedLinear(graph, self._layers)
        graph.output(self._part.add(graph, x, out), "rows", outputs)
        self._session = graph.session()
        self._rows = self._noise(max(_TRIED_SIZES), shape.inputs)
        self._before: Array = np.zeros((len(self._rows), outputs), np.float32)

    def keeps_among(self, size: int) -> bool:
        """Compare rows of a mixed batch with each row alone, and among rows of its adapter."""
        mixed = [_TRIED_PLACES[number % len(_TRIED_PLACES)] for number in range(size)]
        together = self._computed(0, mixed)
        for number in {0, size // 2, size - 1}:
            place, found = mixed[number], together[number]
            if not place:
                if found.any():
                    return False
                continue
            alone = self._computed(number, [place])[0]
            same = self._computed(0, [place] * size)[number]
            if not (np.array_equal(found, alone) and np.array_equal(same, alone)):
                return False
        return True

    def keeps_beside(self, less: int, size: int) -> bool:
        """Compare rows of an adapter of rank ``less`` beside others of that rank, and higher."""
        self.fill([1], less)
        beside = self._computed(0, [1] * size)
        self.fill(range(2, self.places + 1), 0)
        narrow = self._computed(0, [1] * size)
        self.fill([2], self._rank)
        return np.array_equal(beside, narrow)

    def fill(self, places: Iterable[int], rank: int) -> None:
        """Put random adapters of ``rank`` into ``places``; 0: none."""
        for place in places:
            self._part.put(
                place, {one.name: self._factors(one, rank) for one in self._layers if rank}
            )

    def _factors(self, layer: Layer, rank: int) -> LowRank:
        inputs, outputs = layer.shape
        return LowRank(self._noise(inputs, rank), self._noise(rank, outputs))

    def _noise(self, *shape: int) -> Array:
        return self._random.standard_normal(shape, np.float32)

    def _computed(self, first: int, of_rows: Sequence[int]) -> Array:
        """Return what adapters add to the rows from ``first`` on."""
        count = len(of_rows)
        adapters = AdapterRows(of_rows, [1] * count)
        named = {**adapters.feeds(count), **dict(self._part.feeds(adapters))}
        given = self._rows[first : first + count]
        found: Array = self._session(given, self._before[:count], named=named)[0]
        return found
