"""Quantized weights as integers, in the memory order of ONNX Runtime's products.

MLX packs codes as a stream of bits, the first one lowest. Codes of 2, 4 and 8 bits are used as
they lie; the products have no other widths, so codes of 3 bits become 4, those of 5 and 6 become
8. The four-bit floats of mxfp4 and nvfp4 are multiples of one half up to 6, so twice such a value
is an integer code of 8 bits. Nothing of this rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.cpu.onnx.graphs import Unsupported

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]

WIDER = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}
"""Bits of the codes that are kept, by those of an affine checkpoint."""
SMALL_FLOATS = ("mxfp4", "nvfp4")
"""Modes whose values are integer codes of 8 bits."""
ELEMENTS_AT_ONCE = 1 << 22
"""Number of codes unpacked to floats at once."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix (out, in) of ``scales * code + offsets``."""

    bits: int  # 2, 4 or 8
    packed: Bytes  # (out, groups, group size * bits / 8), lowest bits first
    scales: Array  # (out, groups)
    offsets: Array  # (out, groups)

    @property
    def group_size(self) -> int:
        return int(self.packed.shape[2] * 8 // self.bits)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.packed.shape[0], self.packed.shape[1] * self.group_size

    @property
    def middle(self) -> int:
        """The code that a product without zero points treats as 0."""
        return int(2 ** (self.bits - 1))

    def halves(self) -> tuple[Codes, Codes]:
        """Return two 4-bit matrices whose sum is this 8-bit matrix."""
        assert self.bits == 8
        high, low = self.packed >> 4, self.packed & 15
        return (
            Codes(4, packed(high.astype(np.uint8)), self.scales * np.float32(16), self.offsets),
            Codes(4, packed(low.astype(np.uint8)), self.scales, np.zeros_like(self.offsets)),
        )

    def widened(self) -> Codes:
        """Return the same matrix with 4-bit codes instead of 2-bit codes."""
        assert self.bits == 2
        each = np.stack([self.packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
        wide = each.reshape(*self.packed.shape[:2], -1) + np.uint8(6)  # the middle is 8, not 2
        return Codes(4, packed(wide.astype(np.uint8)), self.scales, self.offsets - 6 * self.scales)

    def dense(self) -> Array:
        """Return the matrix in fp32."""
        values = np.empty((*self.scales.shape, self.group_size), np.float32)
        in_a_byte, largest = 8 // self.bits, np.uint8((1 << self.bits) - 1)
        for place in range(in_a_byte):
            values[..., place::in_a_byte] = self.packed >> self.bits * place & largest
        values *= self.scales[..., None]
        values += self.offsets[..., None]
        return values.reshape(self.shape)

    def rows(self, chosen: NDArray[np.integer[Any]]) -> Codes:
        """Return some of the rows."""
        return Codes(self.bits, self.packed[chosen], self.scales[chosen], self.offsets[chosen])


def code_bits(bits: int, mode: str) -> int | None:
    """Return the bits of the codes for weights quantized by MLX in this way, None if
    unsupported."""
    return 8 if mode in SMALL_FLOATS else WIDER.get(bits) if mode == "affine" else None


def packed(codes: Bytes) -> Bytes:
    """Return 4-bit codes (..., even number), two per byte."""
    both = codes[..., 0::2] | codes[..., 1::2] << 4
    return both.astype(np.uint8)


def joined(parts: list[Codes]) -> Codes:
    """Return the rows of all ``parts``. Raises `Unsupported` if they are of different kinds."""
    if len({(part.bits, part.group_size, part.shape[1]) for part in parts}) > 1:
        raise Unsupported("layers that are computed together have different quantizations")
    return Codes(
        parts[0].bits,
        np.concatenate([part.packed for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.offsets for part in parts]),
    )


def codes_of(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    *,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None = None,
) -> Codes:
    """Return the codes of a matrix that MLX quantized; `mx.quantize` documents the arguments.

    Raises `Unsupported` for mxfp8, whose values have exponents of their own."""
    if mode in SMALL_FLOATS:
        return _of_small_floats(weight, scales, group_size, bits, mode, global_scale)
    if biases is None or code_bits(bits, mode) is None:
        raise Unsupported(f"no integer codes for weights in {mode} with {bits} bits")
    floats, offsets = _float32(scales), _float32(biases)
    if WIDER[bits] == bits:
        return lying_codes(np.asarray(weight), floats, offsets, bits)
    # The middle stays the middle, because 8-bit activations lose accuracy with the distance from
    # it.
    shift = (2 ** (WIDER[bits] - 1)) - 2 ** (bits - 1)
    offsets = offsets - floats * np.float32(shift)
    one, zero = mx.ones_like(scales), mx.zeros_like(scales)
    wide = [
        _unpacked(weight[some], one[some], zero[some], group_size, bits, mode)
        for some in _pieces(weight, bits)
    ]
    each = (np.concatenate(wide) + shift).astype(np.uint8)
    each = each.reshape(*floats.shape, group_size)
    return Codes(WIDER[bits], packed(each) if WIDER[bits] == 4 else each, floats, offsets)


def lying_codes(words: NDArray[Any], scales: Array, offsets: Array, bits: int) -> Codes:
    """Return codes used as MLX packed them into ``words`` (out, in * bits / 32)."""
    return Codes(bits, words.view(np.uint8).reshape(*scales.shape, -1), scales, offsets)


def _of_small_floats(
    weight: mx.array,
    scales: mx.array,
    group_size: int,
    bits: int,
    mode: str,
    global_scale: mx.array | None,
) -> Codes:
    """Return the codes of e2m1 values: 128 plus twice the value."""
    unit = mx.full(scales.shape, 127 if mode == "mxfp4" else 0x38, mx.uint8)  # 1 as e8m0, e4m3
    shape = (*scales.shape, group_size)
    values = np.concatenate(
        [
            _unpacked(weight[some], unit[some], None, group_size, bits, mode)
            for some in _pieces(weight, bits)
        ]
    ).reshape(shape)
    codes = (values * 2 + 128).astype(np.uint8)
    if mode == "mxfp4":  # a power of two
        factors = np.ldexp(np.float32(0.5), np.asarray(scales).astype(np.int32) - 127)
    else:
        factors = _float32(mx.from_fp8(scales, mx.float32)) * np.float32(0.5)
    if global_scale is not None:
        factors = factors * _nvfp4_factor(global_scale)
    factors = factors.astype(np.float32)
    return Codes(8, codes, factors, factors * np.float32(-128))


def _nvfp4_factor(global_scale: mx.array) -> np.float32:
    """Return MLX's multiplier: scales were stored relative to the largest, 448 * 6."""
    return np.float32(global_scale.item() / (448.0 * 6.0))


def _unpacked(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    group_size: int,
    bits: int,
    mode: str,
) -> Array:
    found = mx.dequantize(
        weight, scales, biases, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32
    )
    return np.asarray(found)


def _pieces(weight: mx.array, bits: int) -> list[slice]:
    """Return slices of rows with up to `ELEMENTS_AT_ONCE` codes."""
    rows = max(1, ELEMENTS_AT_ONCE // (weight.shape[1] * 32 // bits))
    return [slice(start, start + rows) for start in range(0, weight.shape[0], rows)]


def _float32(array: mx.array) -> Array:
    return np.asarray(array.astype(mx.float32))
