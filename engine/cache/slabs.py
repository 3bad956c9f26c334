"""Slabs: the arrays that hold keys and values of running sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.backend.settling import compute
from engine.cache.layout import ArrayLayout, Layout, ScalesPlace
from engine.cache.quantization import (
    KERNEL_GROUPS,
    Quantized,
    dequantize,
    pack,
    quantize,
    unpack,
)
from engine.cache.states import StateStore
from engine.plan import Slot


class StoredKV(NamedTuple):
    """Keys or values as a slab stores them."""

    array: mx.array  # (batch, kv_heads, width, ...)
    scales: mx.array | None  # (2, batch, kv_heads, width, groups), None if nothing is quantized

    @classmethod
    def of(cls, new: mx.array, kind: ArrayLayout) -> StoredKV:
        """Convert ``new`` (batch, kv_heads, width, dim). It is rounded here and never again."""
        if kind.quantization is None:
            return cls(new, None)
        return cls(to_slab(quantized := quantize(new, kind.quantization), kind), quantized.scales)


def to_slab(quantized: Quantized, kind: ArrayLayout) -> mx.array:
    """Return ``quantized`` in the form that a slab keeps: values, or codes packed in uint32."""
    scheme = kind.quantization
    assert scheme is not None
    if kind.dequantized:
        return dequantize(quantized, scheme).astype(kind.dtype)
    return pack(quantized.codes, scheme.bits).view(mx.uint32)


class Slab:
    """``rows`` slots of ``capacity`` tokens.

    The arrays are written in place, which MLX does only while nothing else holds a reference. So
    take slices, use them in a graph that is dispatched before the next write, and never keep
    them. An array that is evaluated by name is held until the device is done. A new slab is
    therefore not evaluated here, but together with the first write."""

    def __init__(self, layout: Layout, rows: int, capacity: int, *, in_place: bool = False) -> None:
        """``in_place``: the host writes into the arrays, and no graph does except those of
        `copy_row` and `resize`. Each array is then created when it is first used: to create all of
        a long slab takes so long that running sequences would notice."""
        self.rows = rows
        self.capacity = capacity
        self.in_place = in_place
        self._kinds = layout.arrays
        self._rings = [layout.ring_tokens(number) for number in range(len(layout.arrays))]
        self.places = layout.places
        """Where keys of layer 0, values of layer 0, keys of layer 1, and so on, are."""
        self._shared = [place.half is not None for place in layout.places if place.half != 1]
        self.arrays: list[mx.array] = []
        """Keys and values of each layer: (rows, kv_heads, capacity, dim), or (2 * rows, ...)
        with the keys of all rows before the values, see `ArrayPlace`. An array that is quantized
        and not dequantized contains codes packed in uint32. For a layer with a ring shorter than
        the capacity, the array has the length of the ring."""
        self._scales_places = layout.scales
        for number, kind in enumerate(layout.arrays):
            half = layout.places[number].half
            if half == 1:
                continue
            count = rows if half is None else 2 * rows
            shape, dtype = (count, kind.kv_heads, self.ring(number) or capacity), kind.dtype
            dim, scheme = kind.dim, kind.quantization
            if scheme is not None and not kind.dequantized:
                dim, dtype = scheme.code_bytes(dim) // mx.uint32.size, mx.uint32
            self.arrays.append(mx.zeros((*shape, dim), dtype))
        self.scales: list[mx.array] = []
        """(arrays, 2, rows, kv_heads, capacity, groups): scales and biases of quantized arrays, see
        `Layout.scales`. The capacity is that of the arrays."""
        members: dict[int, list[int]] = {}
        for number, place in enumerate(layout.scales):
            if place is not None:
                members.setdefault(place.array, []).append(number)
        for numbers in members.values():
            kind, scheme = layout.arrays[numbers[0]], layout.arrays[numbers[0]].quantization
            assert scheme is not None
            tokens, groups = self.ring(numbers[0]) or capacity, kind.dim // scheme.group_size
            every = (len(numbers), 2, rows, kind.kv_heads, tokens, groups)
            self.scales.append(mx.zeros(every, mx.float16))
        self.last_tokens = mx.zeros((rows,), mx.int32)
        """(rows,): the token that each row sampled last, on the device."""

    @property
    def contents(self) -> list[mx.array]:
        """All arrays that graphs of a step write, to be evaluated."""
        return [self.last_tokens] if self.in_place else self.whole

    @property
    def whole(self) -> list[mx.array]:
        """All arrays."""
        return [*self.arrays, *self.scales, self.last_tokens]

    def part(self, number: int) -> mx.array:
        """Return keys or values of a layer: (rows, kv_heads, capacity, dim)."""
        array, first = self.arrays[self.places[number].array], self.first_row(number)
        return array[first : first + self.rows]

    def host_part(self, number: int) -> NDArray[Any]:
        """Return `part` as memory that is written in place."""
        array, first = np.asarray(self.arrays[self.places[number].array]), self.first_row(number)
        return array[first : first + self.rows]

    def first_row(self, number: int) -> int:
        """Return the index of row 0 of keys or values ``number`` in their array."""
        return self.rows if self.places[number].half == 1 else 0

    def ring(self, number: int) -> int | None:
        """Return the number of positions of array ``number`` if it is a ring, None if it has all
        positions."""
        ring = self._rings[number]
        return None if ring is None or ring >= self.capacity else ring

    def put(self, number: int, row: int, start: int, kept: StoredKV) -> None:
        """Write ``kept``, one row without the batch axis, at positions from ``start`` on.

        If there are more positions than in a ring, only the last ones are written."""
        end = start + kept.array.shape[-2]
        array, at_row = self.places[number].array, self.first_row(number) + row
        for first, last, at in self._stretches(number, start, end):
            its, to = slice(first - start, last - start), slice(at, at + last - first)
            self.arrays[array][at_row, :, to] = kept.array[..., its, :]
            if (place := self._scales_places[number]) is not None:
                assert kept.scales is not None
                self.scales[place.array][place.at, :, row, :, to] = kept.scales[..., its, :]

    def get(self, number: int, row: int, start: int, end: int) -> StoredKV:
        """Return positions ``start`` to ``end`` of array ``number`` of ``row``, in the form for
        `put`.

        All positions must still be in the ring."""
        parts = self._stretches(number, start, end)
        array, at_row = self.arrays[self.places[number].array], self.first_row(number) + row
        values = [array[at_row, :, at : at + b - a] for a, b, at in parts]
        if (whole := self.scales_of(number)) is None:
            return StoredKV(_joined(values), None)
        scales = [whole[:, row, :, at : at + b - a] for a, b, at in parts]
        return StoredKV(_joined(values), _joined(scales))

    def scales_place(self, number: int) -> ScalesPlace | None:
        """Return where the scales of array ``number`` are, None if it is not quantized."""
        return self._scales_places[number]

    def scales_of(self, number: int) -> mx.array | None:
        """Return the scales of array ``number``: (2, rows, kv_heads, capacity, groups)."""
        place = self._scales_places[number]
        return None if place is None else self.scales[place.array][place.at]

    def _stretches(self, number: int, start: int, end: int) -> list[tuple[int, int, int]]:
        """Return where positions ``start`` to ``end`` lie: from, to, and the index of the first."""
        ring = self.ring(number)
        if ring is None:
            return [(start, end, start)]
        start = max(start, end - ring)
        wrap = min(end, -(-(start + 1) // ring) * ring)  # later positions are at the start
        return [(start, wrap, start % ring), *([(wrap, end, 0)] if wrap < end else [])]

    def read(self, number: int, rows: slice | mx.array, length: int, first: int = 0) -> mx.array:
        """Return array ``number`` as attention reads it: (rows, kv_heads, positions, dim), from
        position ``first`` to ``length``; for a ring, these are indices."""
        kind = self._kinds[number]
        array = self.part(number)[:, :, first:length][rows]
        if kind.quantization is None or kind.dequantized:
            return array
        bits, size = kind.quantization
        whole = self.scales_of(number)
        assert whole is not None
        scales = whole[:, :, :, first:length][:, rows]
        if size in KERNEL_GROUPS:
            wide = scales.astype(mx.float32)
            found = mx.dequantize(array, wide[0], wide[1], group_size=size, bits=bits)
        else:
            codes = unpack(array.view(mx.uint8), bits)
            found = dequantize(Quantized(codes, scales), kind.quantization)
        return found.astype(kind.dtype)

    def clear_row(self, row: int) -> None:
        """Fill ``row`` with zeros."""
        for array, is_shared in zip(self.arrays, self._shared, strict=True):
            for each in (row, self.rows + row) if is_shared else (row,):
                if self.in_place:
                    np.asarray(array)[each] = 0
                else:
                    array[each] = 0
        for scales in self.scales:
            if self.in_place:
                np.asarray(scales)[:, :, row] = 0
            else:
                scales[:, :, row] = 0

    def resize(self, rows: int) -> None:
        """Change the number of ``rows`` of the slab. Arrays are copied and evaluated one at a time,
        so that only one of them takes additional memory."""
        for number, array in enumerate(self.arrays):
            self.arrays[number] = _resized(array, 0, rows, 1 + self._shared[number])
            del array
        for number, scales in enumerate(self.scales):
            self.scales[number] = _resized(scales, 2, rows)
            del scales
        self.last_tokens = _resized(self.last_tokens, 0, rows)
        self.rows = rows

    def copy_row(self, row: int, source: Slab, source_row: int, length: int) -> None:
        """Copy the first ``length`` positions of ``source_row`` of ``source`` to ``row``.

        Nothing is evaluated. ``source`` is read: write it only once `whole` is evaluated."""
        for number, place in enumerate(self.places):
            ours, theirs = self.arrays[place.array], source.arrays[place.array]
            # A ring is copied completely. If the source has not wrapped around, indices equal
            # positions.
            end = min(length, theirs.shape[2])
            at, source_at = self.first_row(number) + row, source.first_row(number) + source_row
            ours[at, :, :end] = theirs[source_at, :, :end]
        for ours, theirs in zip(self.scales, source.scales, strict=True):
            end = min(length, theirs.shape[4])
            ours[:, :, row, :, :end] = theirs[:, :, source_row, :, :end]
        self.last_tokens[row] = source.last_tokens[source_row]

    def copy_positions(self, row: int, source: Slab, source_row: int, start: int, end: int) -> None:
        """Copy positions ``start`` to ``end`` of ``source_row`` of ``source`` to ``row``, as
        `copy_row` does. All of them must be there."""
        for number in range(len(self.places)):
            self.put(number, row, start, source.get(number, source_row, start, end))


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)


def _resized(array: mx.array, axis: int, rows: int, parts: int = 1) -> mx.array:
    """Return an evaluated copy of ``array`` with ``rows`` in each of the ``parts`` along ``axis``;
    new ones are zero."""
    array = mx.unflatten(array, axis, (parts, -1))
    missing = rows - array.shape[axis + 1]
    if missing > 0:
        resized = mx.pad(array, [(0, missing * (i == axis + 1)) for i in range(array.ndim)])
    else:  # a slice would keep the whole array alive
        resized = mx.take(array, mx.arange(rows), axis=axis + 1)
    resized = mx.flatten(resized, axis, axis + 1)
    compute(resized)  # a GPU holds the old array until then, and the next one is resized now
    return resized


class Slabs(dict[int, Slab]):
    """All slabs by their id, and the recurrent state of their slots."""

    def __init__(self) -> None:
        super().__init__()
        self.states = StateStore()

    def free(self, number: int) -> None:
        del self[number]
        self.states.free(number)

    def resize(self, number: int, rows: int) -> None:
        """Give slab ``number`` another number of ``rows``, see `Slab.resize`."""
        self[number].resize(rows)
        self.states.free(number, rows)

    def copy_row(self, source: Slot, target: Slot, length: int) -> list[mx.array]:
        """Copy the first ``length`` positions of ``source``, and its state, to ``target``.

        Return the arrays to evaluate, see `Slab.copy_row`."""
        slab = self[target.slab_id]
        slab.copy_row(target.row, self[source.slab_id], source.row, length)
        return [*slab.whole, *self.states.copy(source, target)]
