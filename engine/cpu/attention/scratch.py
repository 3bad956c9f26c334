"""Values of the rows of a pass, one layer at a time, in the form in which attention reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backend.threads import in_parallel, num_threads
from engine.cpu.onnx import graphs
from engine.cpu.onnx.graphs import Graph, Session
from engine.cpu.pages.host_pages import Group, HostPages, Scratch
from engine.cpu.pages.rounding import Array

WORTH_THREADS = 100_000
"""Number of values above which threads pay off."""
MAX_CALLS = 64
"""Max number of calls whose arguments are kept: one for each part of rows and kind of layer. They
change when rows come, go, or get longer than the arrays."""


class ScratchRows:
    """Rows of a pass whose values are in a `Scratch`."""

    def __init__(
        self,
        pages: HostPages,
        scratch: Scratch,
        tables: Sequence[Sequence[int]],
        ends: Sequence[int],
        capacity: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """``capacity`` is a number of whole pages, enough for the ``ends``. ``part``: the number of
        the part of all heads that is read, and how many parts there are, of a single row."""
        self._pages, self._scratch = pages, scratch
        self._part = part
        self._ends, self._capacity = ends, capacity
        self._tables = np.zeros((len(ends), capacity // pages.page_tokens), np.int64)
        for to, table, end in zip(self._tables, tables, ends, strict=True):
            count = -(-end // pages.page_tokens)
            to[:count] = table[:count]
        self._arguments: dict[Group, tuple[NDArray[np.int64], NDArray[np.bool]]] = {}

    def heads(self, layer: int) -> slice:
        """Return which heads of keys of a layer are read."""
        return self._share(self._pages.layout.layers[layer].kv_heads)

    def _share(self, heads: int) -> slice:
        number, parts = self._part
        return slice(heads * number // parts, heads * (number + 1) // parts)

    def both(self, layer: int) -> list[Array]:
        """Return keys and values (rows, heads, capacity, dim) of a layer, for `read`."""
        its, heads = self._pages.layout.layers[layer], self.heads(layer)
        shape = len(self._ends), its.kv_heads, self._capacity
        both = self._scratch.both(shape, (its.key_dim, its.value_dim))
        return [array[:, heads] for array in both]

    def read(self, layer: int, low: int) -> None:
        """Write positions from ``low`` on of keys and values to `both`. Behind a row's end is zero.
        May be called on any thread."""
        both = self.both(layer)
        self._read(layer, both, slice(0, both[0].shape[0] * both[0].shape[1]), low)

    def read_together(self, layer: int, low: int) -> None:
        """The same on several threads, if there are many values."""
        both = self.both(layer)
        lines = both[0].shape[0] * both[0].shape[1]
        parts = min(num_threads(), lines) if both[0].size >= WORTH_THREADS else 1
        cuts = pairwise(lines * i // parts for i in range(parts + 1))
        in_parallel([partial(self._read, layer, both, slice(*cut), low) for cut in cuts])

    def _read(self, layer: int, both: Sequence[Array], lines: slice, low: int) -> None:
        """Write a part of the ``lines`` (row, head) of ``both``."""
        size, heads, start = self._pages.page_tokens, both[0].shape[1], self.heads(layer).start
        places = self._pages.places[2 * layer : 2 * layer + 2]
        groups = [place.group for place in places if place is not None]
        coded = all(group.how is not None and group.how.is_symmetric for group in groups)
        if coded and len(groups) == 2 and low < size and not graphs.unusable():
            every = groups[0].codes.shape[2]
            firsts = [place.first * every + start for place in places if place is not None]
            every_line = (len(self._ends) * heads, self._capacity, -1)
            outs = [array.reshape(every_line, copy=False)[lines] for array in both]
            self._call(groups, outs)(self, lines, firsts)
            return
        first = low // size
        for row in range(lines.start // heads, -(-lines.stop // heads)):
            some = slice(max(0, lines.start - row * heads), min(heads, lines.stop - row * heads))
            end = self._ends[row]
            table = self._tables[row, first : -(-end // size)]
            stretch = slice(first * size, (first + len(table)) * size)
            for number, array in enumerate(both, 2 * layer):
                target = array[row, some]
                its = slice(start + some.start, start + some.stop)
                self._pages.read_values(number, table, target[:, stretch], its)
                target[:, end:] = 0  # pages may hold NaN there, which times zero is NaN

    def _call(self, groups: Sequence[Group], outs: Sequence[Array]) -> _Call:
        """Return the arguments for reading keys and values from ``groups`` to ``outs`` (lines,
        positions, dim)."""
        kept = self._scratch.calls
        key = *outs[0].shape, *(out.ctypes.data for out in outs)
        call = kept.get(key)
        if call is None or not call.reads(groups):
            if len(kept) >= MAX_CALLS:
                kept.clear()
            call = kept[key] = _Call(groups, outs)
        return call

    def arguments(self, group: Group) -> tuple[NDArray[np.int64], NDArray[np.bool]]:
        """Return the pages of each line (lines, pages), as numbers of heads of the group's first
        array, and which scales (lines, positions * groups) are those of the row."""
        found = self._arguments.get(group)
        if found is None:
            _, arrays, every, *_ = group.codes.shape
            its = self._share(every)
            heads = its.stop - its.start
            index = self._tables[:, None] * (arrays * every) + np.arange(heads)[:, None]
            known = np.arange(self._capacity) < np.array(self._ends)[:, None]
            known = known.repeat(group.scales.shape[-1], axis=-1).repeat(heads, axis=0)
            found = self._arguments[group] = index.reshape(-1, index.shape[-1]), known
        return found


class _Call:
    """Reads keys and values of pages to their places. Used by one thread at a time."""

    def __init__(self, groups: Sequence[Group], outs: Sequence[Array]) -> None:
        # Not their arrays: while there are some the memory of pages cannot grow in place.
        self._groups, self._versions = groups, [group.version for group in groups]
        self._rows: ScratchRows | None = None  # whose arguments these are
        self._arguments: list[tuple[NDArray[np.int64], NDArray[np.bool]]] = []
        self._firsts: NDArray[np.int64] = np.zeros((2, 1), np.int64)
        sizes = [group.how.group_size for group in groups if group.how is not None]
        self._bound = _session(*sizes).bound()
        given: list[tuple[NDArray[Any], tuple[int, ...]]] = []
        for number, (group, out) in enumerate(zip(groups, outs, strict=True)):
            lines, positions, dim = out.shape
            count, arrays, heads, size, _ = group.codes.shape
            scales = dim // sizes[number]
            index: NDArray[np.int64] = np.empty((lines, positions // size), np.int64)
            known: NDArray[np.bool] = np.empty((lines, positions * scales), np.bool)
            self._arguments.append((index, known))
            rows, first = count * arrays * heads, self._firsts[number]
            given += [(group.codes, (rows, size * dim)), (group.scales, (rows, size * scales))]
            given += [(array, array.shape) for array in (index, known, first)]
            flat = lines * positions * scales, sizes[number]
            self._bound.output(number, np.float32, flat, out.ctypes.data)
        for number, (array, shape) in enumerate(given):
            self._bound.input(number, array.dtype, shape, array.ctypes.data)

    def reads(self, groups: Sequence[Group]) -> bool:
        """Return whether this reads from the memory that ``groups`` have now."""
        its = zip(self._groups, groups, self._versions, strict=True)
        return all(one is other and one.version == version for one, other, version in its)

    def __call__(self, rows: ScratchRows, lines: slice, firsts: Sequence[int]) -> None:
        if self._rows is not rows:
            for group, arguments in zip(self._groups, self._arguments, strict=True):
                for to, array in zip(arguments, rows.arguments(group), strict=True):
                    to[...] = array[lines]
            self._rows = rows
        self._firsts[:, 0] = firsts
        self._bound()


@cache
def _session(*group_sizes: int) -> Session:
    """Return keys and values of heads in pages: ``index`` (lines, pages). Scales that are not
    ``known`` (lines, scales) count as zero."""
    graph = Graph()
    found = []
    for number, group_size in enumerate(group_sizes):
        codes = graph.input(f"codes{number}", "heads", f"bytes{number}", dtype=np.int8)
        scales = graph.input(f"scales{number}", "heads", f"scales{number}", dtype=np.float16)
        index = graph.input(f"index{number}", "lines", "pages", dtype=np.int64)
        known = graph.input(f"known{number}", "lines", f"positions{number}", dtype=np.bool)
        index = graph.node("Add", index, graph.input(f"first{number}", 1, dtype=np.int64))
        wide = graph.node("Cast", graph.node("Gather", scales, index, axis=0), to=1)
        wide = graph.node("Reshape", wide, graph.integers(0, -1))
        wide = graph.node(
            "Reshape", graph.node("Where", known, wide, graph.number(0)), graph.integers(-1)
        )
        whole = graph.node("Gather", codes, index, axis=0)
        whole = graph.node("Reshape", whole, graph.integers(-1, group_size))
        found.append(graph.node("DequantizeLinear", whole, wide, axis=0))
    for value, group_size in zip(found, group_sizes, strict=True):
        graph.output(value, "groups", group_size)
    return graph.session(threads=1, in_order=True)
