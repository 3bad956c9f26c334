"""Arrays in one buffer."""

from __future__ import annotations

import mlx.core as mx
import pytest

from engine.cache.packing import ALIGNMENT_BYTES, Packing

PARTS = (((3, 5), mx.uint8), ((2, 3, 1), mx.float16), ((4,), mx.bfloat16), ((2, 2), mx.float32))


def arrays() -> list[mx.array]:
    return [(10 * mx.random.uniform(shape=shape)).astype(dtype) for shape, dtype in PARTS]


def test_arrays_of_odd_sizes_come_back_from_buffers_and_from_bytes() -> None:
    packing, given = Packing(PARTS), arrays()
    packed = packing.pack(given)
    assert packed.dtype == mx.uint8 and packed.size == packing.packed_bytes
    payload = tuple(bytes(part) for part in packing.payload(packed))
    assert [len(part) for part in payload] == [array.nbytes for array in given]
    for copy in (packed, packing.from_payload(payload)):
        for ours, theirs in zip(packing.unpack(copy), given, strict=True):
            assert ours.dtype == theirs.dtype and mx.array_equal(ours, theirs)


def test_each_array_is_aligned_for_a_gpu() -> None:
    packing = Packing(PARTS)
    packed = mx.arange(packing.packed_bytes).astype(mx.uint8)
    starts = [int(part.reshape(-1).view(mx.uint8)[0].item()) for part in packing.unpack(packed)]
    assert all(start % ALIGNMENT_BYTES == 0 for start in starts)


@pytest.mark.parametrize("number", [0, 3])
def test_bytes_of_another_size_are_refused(number: int) -> None:
    packing = Packing(PARTS)
    payload = list(packing.payload(packing.pack(arrays())))
    with pytest.raises(ValueError, match="do not have the size"):
        packing.from_payload(tuple(payload[:-1]))
    payload[number] = bytes(payload[number])[1:]
    with pytest.raises(ValueError, match="do not have the size"):
        packing.from_payload(tuple(payload))
