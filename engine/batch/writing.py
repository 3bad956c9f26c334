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

INDICES = 3
"""Index arrays of a place."""

Arrays: TypeAlias = tuple[mx.array, ...]
Write: TypeAlias = Callable[..., list[mx.array]]


class SlabWriter:
    """Writes keys and values of one layer after the other to the places of a batch.

    Scales wait for `flush`, which writes those of all layers at once, unless attention reads them.
    """

    def __init__(
        self, layout: Layout, places: Sequence[Place], sources: mx.array | None, compiles: bool
    ) -> None:
        """``sources``: see `engine.batch.places.sources`. ``compiles``: whether rounding and
        writing are one compiled function: fewer kernels, and a third of the time to build."""
        self._arrays = layout.arrays
        self._kinds = layout.kinds
        self._scales = layout.scales
        self._places = places
        self._sources = sources
        self._plain = layout.precision.bits == 16
        self._reads_scales = not layout.dequantized
        self._compiles = compiles and layout.dequantized
        self._compiled: dict[tuple[int, int], tuple[Write, list[Arrays]]] = {}
        self._waiting: list[tuple[int, mx.array]] = []
        """Scales (arrays, 2, batch, kv_heads, width, groups, 1) of an array and those after it."""

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store keys and values (batch, kv_heads, width, dim) of ``layer``."""
        number = 2 * layer
        if self._sources is not None:
            keys = mx.take_along_axis(keys, self._sources, axis=2)
            values = mx.take_along_axis(values, self._sources, axis=2)
        if self._plain:
            for place in self._places:
                place.put(number, keys)
                if values.size:
                    place.put(number + 1, values)
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
                    place.put(number, kept.array)
                if kept.scales is not None:
                    self._waiting.append((number, kept.scales[None, ..., None]))
            number += 1
        if self._reads_scales:
            self.flush()

    def flush(self) -> None:
        """Write the scales of all layers since the last call."""
        by_array: dict[int, dict[int, mx.array]] = {}
        for number, scales in self._waiting:
            place = self._scales[number]
            assert place is not None
            by_array.setdefault(place.array, {})[place.at] = scales
        self._waiting.clear()
        for array, parts in by_array.items():
            found = [parts[first] for first in sorted(parts)]
            indices = [first + i for first in sorted(parts) for i in range(parts[first].shape[0])]
            scales = found[0] if len(found) == 1 else mx.concatenate(found)
            for to in self._places:
                to.put_scales(array, indices, scales.squeeze(-1))

    def _write_compiled(self, number: int, *new: mx.array) -> None:
        """Write ``new`` into arrays ``number`` and following, which are all of one kind."""
        key = self._kinds[number], len(new)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(number, new)
        write, indices = compiled
        end = number + len(new)
        inputs = [*new]
        for place, index in zip(self._places, indices, strict=True):
            inputs += place.slab.arrays[number:end]
            inputs += index
        scales, *written = write(*inputs)
        for i, place in enumerate(self._places):
            place.slab.arrays[number:end] = written[i * len(new) : (i + 1) * len(new)]
        self._waiting.append((number, scales))

    def _compile(self, number: int, new: Arrays) -> tuple[Write, list[Arrays]]:
        """Return a function that writes arrays like ``new``, and the indices for each place."""
        indices = [place.indices(new[0].shape[1]) for place in self._places]
        slabs = (place.slab.arrays[number].shape for place in self._places)
        parts = tuple(place.part for place in self._places)
        write = _compiled(self._arrays[number], len(new), parts, new[0].shape, *slabs)
        return write, indices


@lru_cache(maxsize=128)
def _compiled(
    kind: ArrayLayout, count: int, parts: tuple[Part, ...], *shapes: tuple[int, ...]
) -> Write:
    """Return a compiled function that rounds and writes ``count`` arrays of one ``kind``.

    One for all that it depends on: the shapes too, since MLX keeps what it traced for every
    shape that a function has met, and looks through it in each call. It takes the new arrays,
    and for each place the slab's arrays and the indices. It returns the scales as they wait in
    `SlabWriter`, and the slabs' arrays in that order."""
    scheme = kind.quantization
    assert scheme is not None

    def run(*inputs: mx.array) -> list[mx.array]:
        rounded, scales = round_together(inputs[:count], scheme)
        outputs = [scales]
        size = count + INDICES
        for i, part in enumerate(parts):
            its = inputs[count + i * size : count + (i + 1) * size]
            for array, values in zip(its[:count], rounded, strict=True):
                array[its[count:]] = of_part(values, part)
                outputs.append(array)
        return outputs

    compiled: Write = mx.compile(run)
    return compiled
