"""Blocks: immutable copies of consecutive positions of KV, which other sequences start from."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.cache import host_blocks
from engine.cache.layout import Layout, StorageGroup
from engine.cache.quantization import Quantized, codes_of, pack, unpack
from engine.cache.slabs import Slab, StoredKV, to_slab
from engine.plan import Payload


class BlockStore:
    """The content of the pool's blocks, by the id that the scheduler assigned.

    A block has the parts of each `StorageGroup` in order. They are evaluated when they are
    made, so that a block keeps no other array alive.
    """

    def __init__(self, layout: Layout, block_size: int, in_place: bool = False) -> None:
        """``in_place``: slabs lie in the host's memory and no pending graph uses them, so
        copying outside MLX is safe, and several times as fast."""
        self._groups = layout.groups
        self._in_place = in_place
        self._block_size = block_size
        self._blocks: dict[int, tuple[mx.array, ...]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def save(self, slab: Slab, row: int, start: int, blocks: Sequence[int]) -> list[mx.array]:
        """Copy the slot's positions from ``start`` on. Return the arrays to evaluate."""
        size = self._block_size
        if self._in_place:
            for first, block in enumerate(blocks):
                stretch = slice(start + first * size, start + (first + 1) * size)
                taken = (host_blocks.take(slab, group, row, stretch) for group in self._groups)
                self._blocks[block] = tuple(part for parts in taken for part in parts)
            return []
        end = start + size * len(blocks)
        saved: list[list[mx.array]] = [[] for _ in blocks]
        for group in self._groups:
            for whole in _read_slot(slab, group, row, start, end):
                for position, parts in enumerate(saved):
                    part = whole[..., position * size : (position + 1) * size, :]
                    parts.append(part if len(blocks) == 1 else mx.contiguous(part))
        for block, parts in zip(blocks, saved, strict=True):
            self._blocks[block] = tuple(parts)
        return [part for parts in saved for part in parts]

    def restore(self, slab: Slab, row: int, start: int, blocks: Sequence[int]) -> None:
        """Copy ``blocks`` into the slot, the first of them at position ``start``."""
        write = host_blocks.give if self._in_place else _write_slot
        parts = zip(*(self._blocks[block] for block in blocks), strict=True)
        for group in self._groups:
            write(slab, group, row, start, [next(parts) for _ in group.parts(self._block_size)])

    def insert(self, block: int, payload: Payload) -> Sequence[mx.array]:
        """Make ``block`` from bytes. Return the arrays to evaluate.

        Raises ValueError when the bytes are not of the block's size."""
        shapes = [part for group in self._groups for part in group.parts(self._block_size)]
        parts = [array_from_bytes(*part, data) for part, data in zip(shapes, payload, strict=True)]
        self._blocks[block] = tuple(parts)
        return parts

    def export(self, block: int) -> Payload:
        """Return the bytes of ``block`` without a copy. They keep its memory alive."""
        parts = self._blocks[block]
        mx.eval(parts)
        return tuple(np.asarray(part.view(mx.uint8)).reshape(-1).data for part in parts)

    def evict(self, block: int) -> None:
        self._blocks.pop(block, None)


def array_from_bytes(shape: tuple[int, ...], dtype: mx.Dtype, data: bytes | memoryview) -> mx.array:
    """Return a copy of ``data`` as an array. Raises ValueError when it is not of that size."""
    # An array of one of NumPy's types is evaluated at once. A view of another type is not.
    name = "uint16" if dtype == mx.bfloat16 else str(dtype).rpartition(".")[2]
    array = mx.array(np.frombuffer(data, name).reshape(shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array


def _read_slot(slab: Slab, group: StorageGroup, row: int, start: int, end: int) -> list[mx.array]:
    """Return the parts of ``group`` in a block of positions ``start`` to ``end``."""
    scheme = group.kind.quantization
    whole = mx.stack([slab.arrays[i][row, :, start:end] for i in group.arrays])
    if scheme is None:
        return [whole]
    scales = mx.stack([slab.scales[i][:, row, :, start:end] for i in group.arrays], axis=1)
    if not group.kind.dequantized:
        return [whole.view(mx.uint8), scales]
    return [pack(codes_of(whole, scales, scheme), scheme.bits), scales]


def _write_slot(
    slab: Slab, group: StorageGroup, row: int, start: int, parts: Sequence[Sequence[mx.array]]
) -> None:
    """Write the ``parts`` of ``group`` of consecutive blocks into a slot."""
    scheme, scales = group.kind.quantization, None
    whole, *others = (mx.concatenate(list(part), axis=-2) for part in parts)
    if scheme is not None:
        (scales,) = others
        whole = to_slab(Quantized(unpack(whole, scheme.bits), scales), group.kind)
    for position, number in enumerate(group.arrays):
        its = None if scales is None else scales[:, position]
        slab.put(number, row, start, StoredKV(whole[position], its))
