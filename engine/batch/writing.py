"""Writing new keys and values into slabs, rounded if they are quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import mlx.core as mx

from engine.batch.places import Part, Place, of_part
from engine.cache.layout import ArrayLayout, Layout
from engine.cache.quantization import round_together
from engine.cache.slabs import StoredKV

INDICES = 7
"""Index arrays of a place: three of values, and four of scales."""

Arrays: TypeAlias = tuple[mx.array, ...]
Write: TypeAlias = Callable[..., list[mx.array]]


class SlabWriter:
    """Writes keys and values of one layer after the other to the places of a batch."""

    def __init__(
        self, layout: Layout, places: Sequence[Place], sources: mx.array | None, compiles: bool
    ) -> None:
        """``sources``: see `engine.batch.places.sources`. ``compiles``: whether rounding and
        writing are one compiled function: fewer kernels, and a third of the time to build."""
        self._arrays = layout.arrays
        self._kinds = layout.kinds
        self._places = places
        self._sources = sources
        self._plain = layout.precision.bits == 16
        self._compiles = compiles and layout.dequantized
        self._compiled: dict[tuple[int, int], tuple[Write, list[Arrays]]] = {}

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store keys and values (batch, kv_heads, width, dim) of ``layer``."""
        number = 2 * layer
        if self._sources is not None:
            keys = mx.take_along_axis(keys, self._sources, axis=2)
            values = mx.take_along_axis(values, self._sources, axis=2)
        if self._plain:
            for place in self._places:
                place.put(number, keys, None)
                if values.size:
                    place.put(number + 1, values, None)
            return
        is_pair = self._kinds[number] == self._kinds[number + 1]
        if self._compiles and is_pair and self._arrays[number].quantization is not None:
            self._write_compiled(number, keys, values)
            return
        for new in (keys, values):
            kind = self._arrays[number]
            if kind.dim and self._compiles and kind.quantization is not None:
                self._write_compiled(number, new)
            elif kind.dim:
                kept = StoredKV.of(new, kind)
                for place in self._places:
                    place.put(number, kept.array, kept.scales)
            number += 1

    def _write_compiled(self, number: int, *new: mx.array) -> None:
        """Write ``new`` into arrays ``number`` and following, which are all of one kind."""
        key = self._kinds[number], len(new)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(number, new)
        write, indices = compiled
        numbers = (number, number + 1)[: len(new)]
        inputs = [*new]
        for place, index in zip(self._places, indices, strict=True):
            slab = place.slab
            for i in numbers:
                inputs += slab.arrays[i], slab.scales[i]
            inputs += index
        written = write(*inputs)
        at = 0
        for place in self._places:
            slab = place.slab
            for i in numbers:
                slab.arrays[i], slab.scales[i] = written[at : at + 2]
                at += 2

    def _compile(
        self, number: int, new: tuple[mx.array, ...]
    ) -> tuple[Write, list[tuple[mx.array, ...]]]:
        """Return a function that writes arrays like ``new``, and the indices for each place."""
        indices = [place.indices(new[0].shape[1]) for place in self._places]
        slabs = (place.slab.arrays[number].shape for place in self._places)
        parts = tuple(place.part for place in self._places)
        write = _compiled(self._arrays[number], len(new), parts, new[0].shape, *slabs)
        return write, [(*index.of_values, *index.of_scales) for index in indices]


@lru_cache(maxsize=128)
def _compiled(
    kind: ArrayLayout, count: int, parts: tuple[Part, ...], *shapes: tuple[int, ...]
) -> Write:
    """Return a compiled function that rounds and writes ``count`` arrays of one ``kind``.

    One for all that it depends on: the shapes too, since MLX keeps what it traced for every
    shape that a function has met, and looks through it in each call. It takes the new arrays,
    and for each place the slab's arrays, each with its scales, and the indices of both. It
    returns arrays and scales in that order."""
    scheme = kind.quantization
    assert scheme is not None

    def run(*inputs: mx.array) -> list[mx.array]:
        rounded = round_together(inputs[:count], scheme)
        written: list[mx.array] = []
        size = 2 * count + INDICES
        for i, part in enumerate(parts):
            its = inputs[count + i * size : count + (i + 1) * size]
            for j, (values, marks) in enumerate(rounded):
                array, scales = its[2 * j : 2 * j + 2]
                array[its[-7:-4]] = of_part(values, part)
                scales[its[-4:]] = of_part(marks, part)
                written += array, scales
        return written

    compiled: Write = mx.compile(run)
    return compiled
