"""Writing new keys and values into slabs, rounded if they are quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import mlx.core as mx

from engine.batch.places import Part, Place, of_part
from engine.cache.layout import ArrayLayout, Layout
from engine.cache.quantization import round_together, symmetric_scales
from engine.cache.slabs import StoredKV

INDICES = 3
"""Index arrays of a place."""

Arrays: TypeAlias = tuple[mx.array, ...]
Write: TypeAlias = Callable[..., list[mx.array]]


class SlabWriter:
    """Writes keys and values, layer after layer, to the places of a batch.

    Scales are collected until `flush`, which writes those of all layers at once, unless attention
    reads them."""

    def __init__(
        self, layout: Layout, places: Sequence[Place], sources: mx.array | None, compiles: bool
    ) -> None:
        """``sources``: see `engine.batch.places.sources`. ``compiles``: whether rounding and
        writing are one compiled function, which has fewer kernels and takes a third of the time to
        build."""
        self._arrays = layout.arrays
        self._kinds = layout.kinds
        self._at = layout.places
        self._scales = layout.scales
        self._places = places
        self._slabs = [place.slab for place in places]
        self._sources = sources
        self._plain = layout.precision.bits == 16
        self._reads_scales = not layout.dequantized
        self._compiles = compiles and layout.dequantized
        self._writes: dict[tuple[int, int], tuple[Write, Arrays]] = {}
        self._waiting: dict[int, dict[tuple[int, int], mx.array]] = {}
        """By the number of the slab's array: scales, or the values that represent them, as returned
        by `round_together`, by their first index there and their number."""

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
        if self._compiles and self._at[number].half is not None:
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
                    self._wait(number, 1, kept.scales[None, ..., None])
            number += 1
        if self._reads_scales:
            self.flush()

    def flush(self) -> None:
        """Write the scales of all layers since the last call."""
        for array, parts in self._waiting.items():
            indices = tuple([first + i for first, count in parts for i in range(count)])
            found = list(parts.values())
            scales = (found[0] if len(found) == 1 else mx.concatenate(found)).squeeze(-1)
            if scales.shape[1] == 1:  # the largest magnitudes, from which the scales follow
                scales = symmetric_scales(scales)
            for place in self._places:
                place.put_scales(array, indices, scales)
        self._waiting.clear()

    def _wait(self, number: int, count: int, scales: mx.array) -> None:
        """Leave the ``scales`` of ``count`` arrays starting with ``number`` to `flush`."""
        place = self._scales[number]
        assert place is not None
        self._waiting.setdefault(place.array, {})[place.at, count] = scales

    def _write_compiled(self, number: int, *new: mx.array) -> None:
        """Write ``new`` into one array: keys ``number`` together with the values, or
        one of both."""
        key, array = (self._kinds[number], len(new)), self._at[number].array
        write, indices = self._writes.get(key) or self._compile(number, new)
        if len(self._slabs) == 1:  # the rest takes much of the host's time in a layer
            arrays = self._slabs[0].arrays
            scales, arrays[array] = write(*new, arrays[array], *indices)
        else:
            kept = [slab.arrays[array] for slab in self._slabs]
            scales, *written = write(*new, *kept, *indices)
            for slab, changed in zip(self._slabs, written, strict=True):
                slab.arrays[array] = changed
        self._wait(number, len(new), scales)

    def _compile(self, number: int, new: Arrays) -> tuple[Write, Arrays]:
        """Return a function that writes arrays like ``new`` to the places of this batch, and its
        last arguments."""
        array = self._at[number].array
        indices: list[mx.array] = []
        for place in self._places:
            first_rows = (0, place.slab.rows)[: len(new)]
            indices += place.indices(new[0].shape[1], first_rows)
        shapes = (slab.arrays[array].shape for slab in self._slabs)
        parts = tuple(place.part for place in self._places)
        write = _compiled(self._arrays[number], len(new), parts, new[0].shape, *shapes)
        found = self._writes[self._kinds[number], len(new)] = write, tuple(indices)
        return found


@lru_cache(maxsize=1024)  # one for each number of rows, width and kind of layer
def _compiled(
    kind: ArrayLayout, count: int, parts: tuple[Part, ...], *shapes: tuple[int, ...]
) -> Write:
    """Return a compiled function that rounds ``count`` arrays of one ``kind`` and writes them into
    one array of each slab.

    There is one function per combination of everything it depends on, including shapes, because MLX
    keeps the trace for every shape that a function has seen, and searches them in each call. It
    takes the new arrays, the slab's array for each place, and the indices of each. It returns the
    scales as collected in `SlabWriter`, and the slabs' arrays.
    """
    scheme = kind.quantization
    assert scheme is not None

    def run(*inputs: mx.array) -> list[mx.array]:
        rounded, scales = round_together(inputs[:count], scheme)
        outputs = list(inputs[count : count + len(parts)])
        indices = inputs[count + len(parts) :]
        for i, part in enumerate(parts):
            outputs[i][indices[i * INDICES : (i + 1) * INDICES]] = of_part(rounded, part)
        return [scales, *outputs]

    compiled: Write = mx.compile(run)
    return compiled
