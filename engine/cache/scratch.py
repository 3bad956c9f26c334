"""Values of the rows of a pass, one layer at a time, in the form in which attention reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.backend import graphs
from engine.backend.graphs import Graph, Session
from engine.backend.threads import in_parallel, num_threads
from engine.cache.rounding import Array

if TYPE_CHECKING:
    from engine.cache.host_pages import Group, HostPages

WORTH_THREADS = 100_000
"""Number of values above which threads pay off."""
MAX_CALLS = 64
"""Max number of calls whose arguments are kept: one for each part of rows and kind of layer. They
change when rows come, go, or get longer than the arrays."""


class Scratch:
    """Memory that stays at its place as long as it is large enough."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.float32)
        self._calls: dict[tuple[int, ...], _Call] = {}

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def both(self, shape: tuple[int, ...], dims: tuple[int, int]) -> list[Array]:
        """Return arrays (*shape, dim) of any content."""
        first, last = np.cumsum([prod(shape) * dim for dim in dims]).tolist()
        if last > len(self._memory):
            self._calls.clear()
            self._memory = np.empty(last, np.float32)
        parts = self._memory[:first], self._memory[first:last]
        return [part.reshape(*shape, dim) for part, dim in zip(parts, dims, strict=True)]

    def call(self, group: Group, out: Array) -> _Call:
        """Return the arguments for reading from ``group`` to ``out`` (lines, positions, dim)."""
        places = group.codes.ctypes.data, group.scales.ctypes.data, out.ctypes.data
        key = *places, len(group.codes), *out.shape
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            call = self._calls[key] = _Call(group, out)
        return call


class ScratchRows:
    """Rows of a pass whose values are in a `Scratch`."""

    def __init__(
        self,
        pages: HostPages,
        scratch: Scratch,
        tables: Sequence[Sequence[int]],
        ends: Sequence[int],
        capacity: int,
    ) -> None:
        """``capacity`` is a number of whole pages, enough for the ``ends``."""
        self._pages, self._scratch = pages, scratch
        self._ends, self._capacity = ends, capacity
        self._tables = np.zeros((len(ends), capacity // pages.page_tokens), np.int64)
        for to, table, end in zip(self._tables, tables, ends, strict=True):
            count = -(-end // pages.page_tokens)
            to[:count] = table[:count]
        self._lines: dict[int, tuple[NDArray[np.int64], NDArray[np.bool]]] = {}

    def both(self, layer: int) -> list[Array]:
        """Return keys and values (rows, kv_heads, capacity, dim) of a layer, for `read`."""
        its = self._pages.layout.layers[layer]
        shape = len(self._ends), its.kv_heads, self._capacity
        return self._scratch.both(shape, (its.key_dim, its.value_dim))

    def read(self, layer: int, low: int) -> None:
        """Write positions from ``low`` on of keys and values to `both`. Behind a row's end is zero.
        May be called on any thread."""
        for number, array in enumerate(self.both(layer), 2 * layer):
            self._read(number, array, slice(0, array.shape[0] * array.shape[1]), low)

    def read_together(self, layer: int, low: int) -> None:
        """The same on several threads, if there are many values."""
        both = self.both(layer)
        threads = num_threads() if both[0].size >= WORTH_THREADS else 1

        def share(number: int) -> None:
            for i, array in enumerate(both, 2 * layer):
                lines = array.shape[0] * array.shape[1]
                cut = slice(lines * number // threads, lines * (number + 1) // threads)
                self._read(i, array, cut, low)

        in_parallel([partial(share, number) for number in range(threads)])

    def _read(self, number: int, array: Array, lines: slice, low: int) -> None:
        """Write a part of the ``lines`` (row, head) of ``array``."""
        place, size = self._pages.places[number], self._pages.page_tokens
        if place is None:
            return
        group, at = place
        how, heads = group.how, array.shape[1]
        out = array.reshape(-1, *array.shape[2:])[lines]
        if how is not None and how.is_symmetric and low < size and not graphs.unusable():
            index, known = self._lines_of(group, heads)
            self._scratch.call(group, out)(index[lines] + at * heads, known[lines])
            return
        first = low // size
        for line, target in zip(range(lines.start, lines.stop), out, strict=True):
            row, head = divmod(line, heads)
            end = self._ends[row]
            table = self._tables[row, first : -(-end // size)]
            its = target[None, first * size : (first + len(table)) * size]
            self._pages.read_values(number, table, its, slice(head, head + 1))
            target[end:] = 0  # pages may hold NaN there, which times zero is NaN

    def _lines_of(self, group: Group, heads: int) -> tuple[NDArray[np.int64], NDArray[np.bool]]:
        """Return the pages of each line (lines, pages), as indices of the heads of the group's
        first array, and which scales are those of the row (lines, positions * groups)."""
        kind = id(group)
        if kind not in self._lines:
            per_page = group.codes.shape[1] * heads
            index = self._tables[:, None] * per_page + np.arange(heads)[:, None]
            known = np.arange(self._capacity) < np.array(self._ends)[:, None]
            known = known.repeat(group.scales.shape[-1], axis=-1).repeat(heads, axis=0)
            self._lines[kind] = index.reshape(-1, index.shape[-1]), known
        return self._lines[kind]


class _Call:
    """Reads pages of a group to a place. Used by one thread at a time."""

    def __init__(self, group: Group, out: Array) -> None:
        assert group.how is not None
        lines, positions, dim = out.shape
        *_, size, _ = group.codes.shape
        groups, heads = dim // group.how.group_size, group.codes.shape[0] * group.codes.shape[1]
        heads *= group.codes.shape[2]
        self._index: NDArray[np.int64] = np.empty((lines, positions // size), np.int64)
        self._known: NDArray[np.bool] = np.empty((lines, positions * groups), np.bool)
        self._bound = _session(group.how.group_size).bound()
        given: list[tuple[NDArray[Any], tuple[int, ...]]] = [
            (group.codes, (heads, size * dim)),
            (group.scales, (heads, size * groups)),
            (self._index, self._index.shape),
            (self._known, self._known.shape),
        ]
        for number, (array, shape) in enumerate(given):
            self._bound.input(number, array.dtype, shape, array.ctypes.data)
        shape = lines * positions * groups, group.how.group_size
        self._bound.output(0, np.float32, shape, out.ctypes.data)

    def __call__(self, index: NDArray[np.int64], known: NDArray[np.bool]) -> None:
        self._index[...], self._known[...] = index, known
        self._bound()


@cache
def _session(group_size: int) -> Session:
    """Return the values of heads in pages: ``index`` (lines, pages). Scales that are not ``known``
    (lines, scales) count as zero."""
    graph = Graph()
    codes = graph.input("codes", "heads", "bytes", dtype=np.int8)
    scales = graph.input("scales", "heads", "scales", dtype=np.float16)
    index = graph.input("index", "lines", "pages", dtype=np.int64)
    known = graph.input("known", "lines", "positions", dtype=np.bool)
    found = graph.node("Gather", codes, index, axis=0)
    wide = graph.node("Cast", graph.node("Gather", scales, index, axis=0), to=1)
    wide = graph.node("Reshape", wide, graph.integers(0, -1))
    wide = graph.node("Where", known, wide, graph.number(0))
    found = graph.node("Reshape", found, graph.integers(-1, group_size))
    wide = graph.node("Reshape", wide, graph.integers(-1))
    graph.output(graph.node("DequantizeLinear", found, wide, axis=0), "groups", group_size)
    return graph.session(threads=1, in_order=True)
