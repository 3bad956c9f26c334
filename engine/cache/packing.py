"""Several arrays in one buffer: the storage of a snapshot. Metal limits the number of buffers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import mlx.core as mx
import numpy as np

from engine.plan import Payload

ALIGNMENT_BYTES = 16
"""Each array begins at a multiple of this: Metal's kernels need aligned elements."""


class Packing:
    """The positions of arrays of known shapes and types in one buffer: (bytes,), uint8.

    The type is bytes, so that reading them needs no operation of MLX, which on a GPU would wait for
    all dispatched work."""

    def __init__(self, parts: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> None:
        self._parts = tuple(parts)
        self._stretches: list[slice] = []
        end = 0
        for shape, dtype in self._parts:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = start + prod(shape) * int(dtype.size)
            self._stretches.append(slice(start, end))
        self.packed_bytes = end

    def pack(self, arrays: Sequence[mx.array]) -> mx.array:
        """Return ``arrays`` in one buffer, not evaluated. It may share the buffer of a single
        array."""
        pieces: list[mx.array] = []
        end = 0
        for array, stretch in zip(arrays, self._stretches, strict=True):
            if stretch.start > end:
                pieces.append(mx.zeros(stretch.start - end, mx.uint8))
            pieces.append(array.reshape(-1).view(mx.uint8))
            end = stretch.stop
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def unpack(self, packed: mx.array) -> list[mx.array]:
        """Return the arrays in ``packed`` without a copy."""
        return [
            packed[stretch].view(dtype).reshape(shape)
            for (shape, dtype), stretch in zip(self._parts, self._stretches, strict=True)
        ]

    def from_payload(self, payload: Payload) -> mx.array:
        """Return a copy of ``payload`` in one buffer, evaluated.

        Raises ValueError if the size of the bytes is wrong."""
        parts = [np.frombuffer(data, np.uint8) for data in payload]
        if [part.size for part in parts] != [s.stop - s.start for s in self._stretches]:
            raise ValueError("the bytes do not have the size of the arrays")
        if len(parts) == 1:
            return mx.array(parts[0])
        packed = np.zeros(self.packed_bytes, np.uint8)
        for part, stretch in zip(parts, self._stretches, strict=True):
            packed[stretch] = part
        return mx.array(packed)

    def payload(self, packed: mx.array) -> Payload:
        """Return the bytes of each array in ``packed`` without a copy. They keep it alive."""
        data = np.asarray(packed).data
        return tuple(data[stretch] for stretch in self._stretches)
