"""Blocks: immutable copies of consecutive positions of KV, from which other sequences start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from engine.backend.threads import in_parallel, num_threads
from engine.cache import host_blocks
from engine.cache.host_blocks import SlotReader
from engine.cache.layout import Layout, StorageGroup
from engine.cache.packing import Packing
from engine.cache.quantization import Quantized, codes_of, pack, unpack
from engine.cache.slabs import Slab, StoredKV, to_slab
from engine.plan import Payload, Restore

PIECE_BYTES = 128 << 20
"""Max KV of slots copied from or to blocks in one graph: copies take additional memory, several
times as much if codes are computed."""


class BlockStore:
    """The content of the pool's blocks, by the id that the scheduler assigned.

    A block has the parts of each `StorageGroup` in order, in one buffer. No part of it belongs to
    another array, so that a block keeps nothing else alive.
    """

    def __init__(self, layout: Layout, block_size: int, in_place: bool = False) -> None:
        """``in_place``: slabs are in the host's memory and no pending graph uses them, so copying
        outside MLX is safe, and several times as fast."""
        self._groups = layout.groups
        self._in_place = in_place
        self._block_size = block_size
        self._packing = Packing([p for group in layout.groups for p in group.parts(block_size)])
        slot_bytes = max(1, block_size * layout.slot_token_bytes)
        self._blocks_at_once = max(1, PIECE_BYTES // slot_bytes)
        self._blocks: dict[int, mx.array] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def save(
        self, slab: Slab, row: int, start: int, blocks: Sequence[int]
    ) -> Iterator[list[mx.array]]:
        """Copy the slot's positions from ``start`` on, a bounded number at a time.

        Yield the arrays to evaluate before the next part is created."""
        for first, some in self._pieces(start, blocks):
            save = self._save_in_place if self._in_place else self._save_graph
            saved = save(slab, row, first, len(some))
            self._blocks.update(zip(some, saved, strict=True))
            yield [] if self._in_place else saved

    def together(self, restores: Sequence[Restore]) -> list[list[Restore]]:
        """Return ``restores`` in groups that `restore` can copy at once: if blocks are copied in
        place, those of the same blocks to the same positions of a slab."""
        if not self._in_place:
            return [[each] for each in restores]
        groups: dict[tuple[int, int, tuple[int, ...]], list[Restore]] = {}
        for each in restores:
            key = each.slot.slab_id, each.start, each.block_ids
            groups.setdefault(key, []).append(each)
        return list(groups.values())

    def restore(
        self, slab: Slab, rows: Sequence[int], start: int, blocks: Sequence[int]
    ) -> Iterator[None]:
        """Copy ``blocks`` into the slots ``rows``, starting at position ``start``. There may be
        several rows only if blocks are copied in place.

        Yield where the slab should be evaluated before the next part is copied. The last part is
        left to the graph that writes the slab next."""
        if self._in_place:
            mx.eval(slab.whole)  # several threads will write into them
        for first, some in self._pieces(start, blocks):
            if first > start:
                yield
            packed = [self._blocks[block] for block in some]
            if self._in_place:
                whole = [self._packing.host_views(np.asarray(one)) for one in packed]
                write: Callable[..., None] = host_blocks.give
                to: int | Sequence[int] = rows
            else:
                whole = [self._packing.unpack(one) for one in packed]
                write, (to,) = _write_slot, rows
            parts = zip(*whole, strict=True)
            for group in self._groups:
                its = [next(parts) for _ in group.parts(self._block_size)]
                write(slab, group, to, first, its)

    def insert(self, block: int, payload: Payload) -> None:
        """Create ``block`` from bytes. Raises ValueError if their size is wrong."""
        self._blocks[block] = self._packing.from_payload(payload)

    def exporter(self, block: int) -> Callable[[], Payload]:
        """Return a function that returns the bytes of ``block``, even after it is evicted.

        The bytes are not copied and keep its memory alive. The call waits for the block."""
        return partial(self._packing.payload, self._blocks[block])

    def evict(self, block: int) -> None:
        self._blocks.pop(block, None)

    def _pieces(self, start: int, blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield a few of ``blocks`` at a time, with their position in the slot."""
        for first in range(0, len(blocks), self._blocks_at_once):
            some = blocks[first : first + self._blocks_at_once]
            yield start + first * self._block_size, some

    def _save_in_place(self, slab: Slab, row: int, start: int, count: int) -> list[mx.array]:
        readers = [(group, SlotReader(slab, group, row)) for group in self._groups]
        saved = [mx.zeros(self._packing.packed_bytes, mx.uint8) for _ in range(count)]
        mx.eval(saved)
        views = [self._packing.host_views(np.asarray(packed)) for packed in saved]

        def share(first: int) -> Callable[[], None]:
            def run() -> None:
                for number in range(first, count, step):
                    begin = start + number * self._block_size
                    parts = iter(views[number])
                    for group, reader in readers:
                        targets = [next(parts) for _ in group.parts(self._block_size)]
                        reader.take(slice(begin, begin + self._block_size), targets)

            return run

        step = num_threads() if count > 1 else 1
        in_parallel([share(first) for first in range(step)])
        return saved

    def _save_graph(self, slab: Slab, row: int, start: int, count: int) -> list[mx.array]:
        end = start + count * self._block_size
        blocks: list[list[mx.array]] = [[] for _ in range(count)]
        for group in self._groups:
            for whole in _read_slot(slab, group, row, start, end):
                pieces = mx.split(whole, count, axis=-2) if count > 1 else [whole]
                for parts, piece in zip(blocks, pieces, strict=True):
                    parts.append(piece if count == 1 else mx.contiguous(piece))
        return [self._packing.pack(parts) for parts in blocks]


def _read_slot(slab: Slab, group: StorageGroup, row: int, start: int, end: int) -> list[mx.array]:
    """Return the parts of ``group`` in a block of positions ``start`` to ``end``."""
    scheme = group.kind.quantization
    kept = [slab.get(number, row, start, end) for number in group.arrays]
    whole = mx.stack([each.array for each in kept])
    if scheme is None:
        return [whole]
    scales = mx.stack([each.scales for each in kept if each.scales is not None], axis=1)
    if not group.kind.dequantized:
        return [whole.view(mx.uint8), scales]
    return [pack(codes_of(whole, scales, scheme), scheme.bits), scales]


def _write_slot(
    slab: Slab, group: StorageGroup, row: int, start: int, parts: Sequence[Sequence[mx.array]]
) -> None:
    """Write the ``parts`` of ``group`` of consecutive blocks into a slot."""
    scheme = group.kind.quantization
    whole, *others = (mx.concatenate(list(part), axis=-2) for part in parts)
    count = len(group.arrays)
    scales: Sequence[mx.array | None] = [None] * count
    if scheme is not None:
        whole = to_slab(Quantized(unpack(whole, scheme.bits), others[0]), group.kind)
        scales = [its.squeeze(1) for its in mx.split(others[0], count, axis=1)]
    # Split, because indexing would be a gather for each array.
    for number, array, its in zip(group.arrays, mx.split(whole, count), scales, strict=True):
        slab.put(number, row, start, StoredKV(array.squeeze(0), its))
