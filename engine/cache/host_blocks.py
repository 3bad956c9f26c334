"""Copies between slots and blocks on the CPU, outside MLX.

They make the same bytes as `engine.cache.blocks`, several times as fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.backend.threads import in_parallel, num_threads
from engine.cache.layout import StorageGroup
from engine.cache.packing import HostArray
from engine.cache.rounding import Scales, codes_in_place
from engine.cache.slabs import Slab

WORTH_THREADS = 500_000
"""Number of elements above which threads pay off."""


class SlotReader:
    """Reads blocks of a slot. It refers to the slab, so that MLX must not write it meanwhile."""

    def __init__(self, slab: Slab, group: StorageGroup, row: int) -> None:
        self._how = group.kind.quantization
        self._arrays = [slab.host_part(number)[row] for number in group.arrays]
        quantized = group.arrays if self._how is not None else ()
        self._scales = [host_scales(slab, number)[:, row] for number in quantized]

    def take(self, stretch: slice, targets: Sequence[HostArray]) -> None:
        """Write the parts of the group in a block of the positions ``stretch`` into ``targets``.
        May be called on any thread."""
        found = [array[:, stretch] for array in self._arrays]
        if self._how is None:
            np.stack(found, out=targets[0])
            return
        scales = np.stack([each[:, :, stretch] for each in self._scales], 1)
        targets[1][...] = scales
        codes = codes_in_place(np.stack(found), scales, self._how)
        if self._how.bits == 4:
            codes = codes[..., ::2] | (codes[..., 1::2] << np.uint8(4))
        targets[0][...] = codes


def host_scales(slab: Slab, number: int) -> Scales:
    """Return `Slab.scales_of` a quantized array, as memory that is written in place."""
    place = slab.scales_place(number)
    assert place is not None
    scales: Scales = np.asarray(slab.scales[place.array])[place.at]
    return scales


def give(
    slab: Slab,
    group: StorageGroup,
    rows: Sequence[int],
    start: int,
    parts: Sequence[Sequence[HostArray]],
) -> None:
    """Write the ``parts`` of ``group`` of consecutive blocks into the slots ``rows``.

    They are read from blocks for the first slot, and from that slot, in the cache, for the
    others."""
    length = sum(part.shape[-2] for part in parts[0])
    stretch = slice(start, start + length)

    def share(first: int) -> Callable[[], None]:
        def run() -> None:
            for position in range(first, len(group.arrays), step):
                _give_one(slab, group, rows, stretch, position, parts)

        return run

    elements = len(group.arrays) * group.kind.kv_heads * length * group.kind.dim
    step = num_threads() if elements >= WORTH_THREADS else 1
    in_parallel([share(first) for first in range(step)])


def copy_positions(
    slab: Slab, row: int, source: Slab, source_row: int, start: int, end: int
) -> None:
    """Do what `Slab.copy_positions` does, for slabs without rings."""
    its = slice(start, end)
    for number in range(len(slab.places)):
        slab.host_part(number)[row, :, its] = source.host_part(number)[source_row, :, its]
        if slab.scales_place(number) is not None:
            found = host_scales(source, number)[:, source_row, :, its]
            host_scales(slab, number)[:, row, :, its] = found


def _give_one(
    slab: Slab,
    group: StorageGroup,
    rows: Sequence[int],
    stretch: slice,
    position: int,
    parts: Sequence[Sequence[HostArray]],
) -> None:
    number, how = group.arrays[position], group.kind.quantization
    array, (first, *others) = slab.host_part(number), rows
    target = array[first, :, stretch]
    found = [part[position] for part in parts[0]]
    if how is None:
        np.concatenate(found, axis=-2, out=target)
    else:
        scales = host_scales(slab, number)
        marks = scales[:, first, :, stretch]
        np.concatenate([part[:, position] for part in parts[1]], axis=-2, out=marks)
        codes = np.concatenate(found, axis=-2)
        if how.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1)
        groups = target.reshape(*target.shape[:-1], -1, how.group_size)
        wide = marks.astype(np.float32)[..., None]
        np.multiply(codes.reshape(groups.shape), wide[0], out=groups)
        groups += wide[1]
        for row in others:
            scales[:, row, :, stretch] = marks
    for row in others:
        array[row, :, stretch] = target
