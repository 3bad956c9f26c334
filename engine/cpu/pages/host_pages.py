"""Pages in the host's memory, written and read by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.cache.layout import Layout, StorageGroup
from engine.cache.pages import Pages, StoredKV
from engine.cpu.pages.host_memory import HostMemory
from engine.cpu.pages.rounding import Array, Codes, Scales, round_in_place, values_of
from engine.cpu.pages.unpacked import UnpackedRows
from engine.plan import Payload, Slot

Numbers = NDArray[np.intp]

MAX_IDLE_SCRATCH_BYTES = 64 << 20
"""More memory is given back when a sequence ends."""


class TokenPlaces(NamedTuple):
    """Where new tokens go."""

    pages: Numbers  # the page of each token
    indices: Numbers  # its index in the page


class Scratch:
    """Memory for values that are read from pages. It stays at its place as long as it is large
    enough."""

    def __init__(self) -> None:
        self._memory: Array = np.empty(0, np.float32)
        self.calls: dict[tuple[int, ...], Any] = {}
        """Objects that are bound to this memory, dropped when another one takes its place."""

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def both(self, shape: tuple[int, ...], dims: tuple[int, int]) -> list[Array]:
        """Return arrays (*shape, dim) of any content."""
        first, last = np.cumsum([prod(shape) * dim for dim in dims]).tolist()
        if last > len(self._memory):
            self.calls.clear()
            self._memory = np.empty(last, np.float32)
        parts = self._memory[:first], self._memory[first:last]
        return [part.reshape(*shape, dim) for part, dim in zip(parts, dims, strict=True)]


class Group:
    """All pages of a storage group, page by page as in a payload."""

    def __init__(self, group: StorageGroup, page_tokens: int) -> None:
        self.how = group.kind.quantization
        parts = group.parts(page_tokens)
        self._forms = [(shape, np.dtype(str(dtype).rpartition(".")[2])) for shape, dtype in parts]
        self._memory = [HostMemory(0) for _ in self._forms]
        self.version = 0
        """Changes when the memory may be elsewhere."""
        self.resize(0)

    def resize(self, num_pages: int) -> None:
        self.version += 1
        self.parts: list[NDArray[Any]] = []  # (pages, ...); now no array refers to the memory
        forms = zip(self._memory, self._forms, strict=True)
        self._memory = [
            memory.resized(num_pages * dtype.itemsize * int(np.prod(shape)))
            for memory, (shape, dtype) in forms
        ]
        self.parts = [
            memory.array((num_pages, *shape), dtype)
            for memory, (shape, dtype) in zip(self._memory, self._forms, strict=True)
        ]

    @property
    def codes(self) -> Codes:
        """(pages, arrays, kv_heads, page_tokens, bytes of codes or values)"""
        return self.parts[0]

    @property
    def scales(self) -> Scales:
        """(pages, scales, arrays, kv_heads, page_tokens, groups), if there are codes"""
        return self.parts[1]


class Place(NamedTuple):
    """Where the keys or the values of a layer are."""

    group: Group
    first: int  # number of the array in the group


class HostPages(Pages):
    """Pages that are written at once: nothing is left to evaluate."""

    unpacks = True

    def __init__(self, layout: Layout, page_tokens: int) -> None:
        super().__init__(layout, page_tokens)
        self._groups = [Group(group, page_tokens) for group in layout.groups]
        self.places: list[Place | None] = [None] * len(layout.arrays)
        """Where each of `Layout.arrays` is, None if it has no elements."""
        for storage, group in zip(layout.groups, self._groups, strict=True):
            for first, number in enumerate(storage.arrays):
                self.places[number] = Place(group, first)
        self.unpacked = UnpackedRows(layout, page_tokens)
        self._scratches: list[Scratch] = []

    def resize(self, num_pages: int) -> None:
        for group in self._groups:
            group.resize(num_pages)
        self.num_pages = num_pages

    @property
    def contents(self) -> list[mx.array]:
        return []

    @property
    def nbytes(self) -> int:
        pages = sum(array.nbytes for group in self._groups for array in group.parts)
        unpacked = self.unpacked
        return pages + unpacked.nbytes + unpacked.idle_bytes + self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the arrays that rows are read into, a layer at a time."""
        return sum(each.nbytes for each in self._scratches)

    # -- whole pages ------------------------------------------------------------------

    def copy(self, source: int, target: int, positions: int) -> None:
        for group in self._groups:
            for array in group.parts:
                array[target, ..., :positions, :] = array[source, ..., :positions, :]

    def insert(self, page: int, payload: Payload) -> None:
        targets = [array[page] for group in self._groups for array in group.parts]
        if [len(part) for part in payload] != [target.nbytes for target in targets]:
            raise ValueError("the bytes do not have the size of a page")
        for target, part in zip(targets, payload, strict=True):
            target[...] = np.frombuffer(part, target.dtype).reshape(target.shape)

    def exporter(self, page: int, positions: int | None = None) -> Callable[[], Payload]:
        its = [array[page] for group in self._groups for array in group.parts]
        copies = [np.zeros_like(array) for array in its]
        for copy, array in zip(copies, its, strict=True):
            copy[..., :positions, :] = array[..., :positions, :]
        payload = tuple(memoryview(copy).cast("B") for copy in copies)
        return lambda: payload

    def read(self, number: int, pages: Sequence[int], length: int) -> StoredKV:
        kind, table = self.layout.arrays[number], np.array(pages, np.intp)
        table = table[: -(-length // self.page_tokens)]
        positions = len(table) * self.page_tokens
        out: Array = np.zeros((kind.kv_heads, positions, kind.dim), np.float32)
        self.read_values(number, table, out)
        values = mx.array(out[None, :, :length]).astype(kind.dtype)
        place = self.places[number]
        if place is None or kind.quantization is None:
            return StoredKV(values, None)
        found = np.moveaxis(place.group.scales[table, :, place.first], 0, 2)
        scales = found.reshape(*found.shape[:2], positions, -1)[:, None, :, :length]
        return StoredKV(values, mx.array(scales))

    # -- reading ----------------------------------------------------------------------

    def read_values(
        self, number: int, table: Numbers, out: Array, heads: slice = slice(None)
    ) -> None:
        """Write keys or values of the pages in ``table`` to ``out`` (kv_heads, positions of the
        pages, dim). May be called on any thread."""
        place = self.places[number]
        if place is None:
            return
        group, first = place
        codes = group.codes[table, first, heads].swapaxes(0, 1)
        target = out.reshape(len(out), len(table), self.page_tokens, -1, copy=False)
        if group.how is None:
            target[...] = codes
        else:
            scales = group.scales[table, :, first, heads].transpose(1, 2, 0, 3, 4)
            values_of(codes, scales, group.how, target)

    # -- writing ----------------------------------------------------------------------

    def write_tokens(
        self, layer: int, keys: Array, values: Array, tokens: TokenPlaces
    ) -> tuple[Array, Array]:
        """Store new ``keys`` and ``values`` (tokens, kv_heads, dim), and return them rounded."""

        def write(place: Place, arrays: slice, codes: Codes, scales: Scales | None) -> None:
            its = place.group
            its.codes[tokens.pages, arrays, :, tokens.indices] = codes.swapaxes(0, 1)
            if scales is not None:
                marks = scales.transpose(2, 0, 1, 3, 4)
                its.scales[tokens.pages, :, arrays, :, tokens.indices] = marks

        return self._write(layer, keys, values, write)

    def write_row(
        self, layer: int, keys: Array, values: Array, table: Sequence[int], start: int
    ) -> tuple[Array, Array]:
        """Store new ``keys`` and ``values`` (kv_heads, width, dim) of positions from ``start`` on,
        and return them rounded."""
        end = start + keys.shape[1]
        size = self.page_tokens

        def write(place: Place, arrays: slice, codes: Codes, scales: Scales | None) -> None:
            its = place.group
            for number in range(start // size, -(-end // size)):
                first, last = max(start, number * size), min(end, (number + 1) * size)
                at = slice(first - number * size, last - number * size)
                new, page = slice(first - start, last - start), table[number]
                its.codes[page, arrays, :, at] = codes[:, :, new]
                if scales is not None:
                    its.scales[page, :, arrays, :, at] = scales[:, :, :, new]

        return self._write(layer, keys, values, write)

    def _write(
        self,
        layer: int,
        keys: Array,
        values: Array,
        write: Callable[[Place, slice, Codes, Scales | None], None],
    ) -> tuple[Array, Array]:
        """Round ``keys`` and ``values``, ``write`` codes and scales, and return what is read.

        Keys and values of the same shape are rounded and written together, because with few rows
        the calls take longer than the arithmetic."""
        one, two = self.places[2 * layer], self.places[2 * layer + 1]
        if one is not None and two is not None and one.group is two.group:
            both: Array = np.empty((2, *keys.shape), np.float32)
            both[0], both[1] = keys, values
            write_one(both, one, write)
            return both[0], both[1]
        kept = []
        for new, place in ((keys, one), (values, two)):
            own: Array = np.array(new[None], np.float32, order="C")
            if place is not None:
                write_one(own, place, write)
            kept.append(own[0])
        return kept[0], kept[1]

    # -- values of running sequences ---------------------------------------------------

    def unpack(self, slot: Slot, tokens: int) -> None:
        """Keep the values of ``slot`` unpacked from now on, with room for so many positions; 0:
        drop them. Passes copy what is missing before their new tokens."""
        if tokens:
            self.unpacked.unpack(slot, tokens)
        else:
            self.unpacked.give_back(slot)

    def scratch(self, number: int) -> Scratch:
        """Return the scratch of a thread."""
        while number >= len(self._scratches):
            self._scratches.append(Scratch())
        return self._scratches[number]

    def drop(self, slot: Slot) -> None:
        self.unpacked.free(slot)
        if sum(each.nbytes for each in self._scratches) > MAX_IDLE_SCRATCH_BYTES:
            self._scratches.clear()  # a longer row than others may have ended


def write_one(
    new: Array, place: Place, write: Callable[[Place, slice, Codes, Scales | None], None]
) -> None:
    """Round ``new`` (arrays, ...) in place, and ``write`` its codes and scales."""
    arrays, how = slice(place.first, place.first + len(new)), place.group.how
    if how is None:
        write(place, arrays, new, None)
    else:
        write(place, arrays, *round_in_place(new, how))
