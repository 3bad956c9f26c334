"""Quantization of keys and values, in MLX.

Each group of neighbouring elements of a head has a scale and a bias in fp16. An element is
stored as an integer, its code, and read as ``code * scale + bias``. With 8 bits the scale
follows from the largest magnitude, and the bias is -128 times the scale; with 4 bits they follow
from the smallest and the largest element.

* The product of a code and a scale has at most 19 bits, so it is exact in fp32. A value read is
  therefore one rounding of the same sum on every device and in every library.
* With 4 bits the bias is slightly below the smallest element, and the scale slightly larger than
  necessary. Rounding them to fp16 therefore clips nothing, and ``|bias| < 2**20 * scale``.
* Codes can therefore be recovered from values in fp32: ``(value - bias) / scale`` is off by less
  than ``2**-24 * (|bias| / scale + 3 * 255)``, which is under 0.1.
* Values in 16 bits may belong to several 4-bit codes. The recovered code gives the same value
  again (`codes_of`), so it does not matter which one it is.

A value that was read is never rounded again, so every value is quantized once."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

MIN_GROUP_SIZE = 16
"""With fewer elements, scales and biases take too much memory."""
MIDDLE = 128
"""The code of zero in symmetric quantization, which is used for 8 bits."""

MARGIN = 2.0**-10
"""A relative margin of twice the error of rounding to fp16."""
SMALLEST_SCALE = 2.0**-24
"""The smallest positive fp16 number, and the rounding error of small numbers."""
LARGEST = 64_000.0
"""Larger elements are clipped: 128 times their scale is still an fp16 number, and a bfloat16
number."""


class Quantization(NamedTuple):
    """A quantization of heads of one size."""

    bits: int  # bits of a code
    group_size: int  # number of elements that share a scale and a bias

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def is_symmetric(self) -> bool:
        """Whether the bias follows from the scale, so that zero is representable."""
        return self.bits == 8

    @property
    def scales(self) -> int:
        """Numbers of a group: a scale, and a bias if it does not follow from the scale."""
        return 1 if self.is_symmetric else 2

    def code_bytes(self, dim: int) -> int:
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        """Return the bytes of the scales and biases of ``dim`` elements."""
        return self.scales * int(mx.float16.size) * (dim // self.group_size)


class Precision(NamedTuple):
    """The requested precision of keys and values."""

    bits: int = 16  # bits of an element, 16 for the model's own type
    group_size: int = 64

    def for_dim(self, dim: int) -> Quantization | None:
        """Return the quantization of heads of ``dim`` elements.

        Its group size is halved until it divides ``dim``. None if it would become too small, or if
        nothing is quantized."""
        if self.bits == 16 or not dim:
            return None
        size = self.group_size
        while dim % size and size > MIN_GROUP_SIZE:
            size //= 2
        return None if dim % size else Quantization(self.bits, size)


UNQUANTIZED = Precision()


class Quantized(NamedTuple):
    """Quantized elements."""

    codes: mx.array  # (..., dim) in uint8, one byte for each code of any number of bits
    scales: mx.array  # (2, ..., groups) in fp16: the scales, then the biases


def quantize(x: mx.array, scheme: Quantization) -> Quantized:
    """Quantize ``x`` (..., positions, dim). Elements beyond `LARGEST` are clipped."""
    groups = x.reshape(*x.shape[:-1], -1, scheme.group_size)
    if scheme.is_symmetric:
        scales = symmetric_scales(mx.abs(groups).max(axis=-1)[None, None])[0]
        codes = mx.round(clipped(groups) / _columns(scales)[0]) + MIDDLE
        return Quantized(codes.astype(mx.uint8).reshape(x.shape), scales)
    bias = _bias(groups.min(axis=-1))
    scales = mx.stack([_scale(groups.max(axis=-1), bias, scheme), bias])
    return Quantized(codes_of(x.astype(mx.float32), scales, scheme), scales)


def symmetric_scales(largest: mx.array) -> mx.array:
    """Return scales and biases (arrays, 2, ...) of groups from their ``largest``
    (arrays, 1, ...)."""
    return symmetric_scale(largest) * _scale_and_bias(largest.ndim)


def with_biases(scales: mx.array) -> mx.array:
    """Return scales and biases (2, ...), of which symmetric quantization stores the scales alone:
    (1, ...)."""
    if len(scales) == 2:
        return scales
    return mx.concatenate([scales, scales * mx.array(-MIDDLE, mx.float16)])


@cache
def _scale_and_bias(ndim: int) -> mx.array:
    factors = mx.array([1, -MIDDLE], mx.float16).reshape(2, *[1] * (ndim - 2))
    mx.eval(factors)
    return factors


def clipped(x: mx.array) -> mx.array:
    return mx.minimum(mx.maximum(x.astype(mx.float32), -LARGEST), LARGEST)


def symmetric_scale(largest: mx.array) -> mx.array:
    """Return the fp16 scale of groups from their ``largest`` magnitude.

    A sum times a number: compilers fuse a product with a sum, with different bits in different
    kernels."""
    codes = MIDDLE - 1
    return (
        (mx.minimum(largest.astype(mx.float32), LARGEST) + codes * SMALLEST_SCALE)
        * ((1 + MARGIN) / codes)
    ).astype(mx.float16)


def _bias(low: mx.array) -> mx.array:
    """Return the fp16 bias of groups whose minimum is ``low``."""
    low = clipped(low)
    return mx.minimum(low * (1 - MARGIN), low * (1 + MARGIN)).astype(mx.float16)


def _scale(high: mx.array, bias: mx.array, scheme: Quantization) -> mx.array:
    """Return the fp16 scale of groups with elements up to ``high``."""
    span = clipped(high) - bias.astype(mx.float32)
    return (span * ((1 + MARGIN) / scheme.max_code) + SMALLEST_SCALE).astype(mx.float16)


def _nearest(groups: mx.array, scale: mx.array, bias: mx.array, scheme: Quantization) -> mx.array:
    """Return the nearest codes to ``groups``, as numbers of fp32."""
    return mx.clip(mx.round((groups - bias) / scale), 0, scheme.max_code)


def codes_of(values: mx.array, scales: mx.array, scheme: Quantization) -> mx.array:
    """Return the codes of ``values`` (..., dim), which may already be dequantized.

    Values dequantized to 16 bits get codes that give the same values again. That is the nearest
    code, unless the value is a power of two, below which numbers are twice as dense: then it is one
    of its neighbours. Symmetric codes are recovered exactly, because rounding moves a value by at
    most a quarter of a step."""
    scale, bias = _columns(scales)
    groups = values.reshape(*values.shape[:-1], -1, scheme.group_size)
    codes = _nearest(groups.astype(mx.float32), scale, bias, scheme)
    if values.dtype != mx.float32 and not scheme.is_symmetric:
        nearest = codes
        for shift in (1, -1):
            near = mx.clip(nearest + shift, 0, scheme.max_code)
            is_wrong = (codes * scale + bias).astype(values.dtype) != groups
            is_right = (near * scale + bias).astype(values.dtype) == groups
            codes = mx.where(is_wrong & is_right, near, codes)
    return codes.astype(mx.uint8).reshape(values.shape)


def dequantize(quantized: Quantized, scheme: Quantization) -> mx.array:
    """Return the values (..., dim) in fp32."""
    codes, scales = quantized
    scale, bias = _columns(scales)
    groups = codes.reshape(*codes.shape[:-1], -1, scheme.group_size)
    return (groups.astype(mx.float32) * scale + bias).reshape(codes.shape)


def fake_quantize(x: mx.array, scheme: Quantization) -> mx.array:
    """Return ``x`` quantized and dequantized, in its own type."""
    return dequantize(quantize(x, scheme), scheme).astype(x.dtype)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Return ``codes`` packed as (..., bytes). Of two 4-bit codes, the first is in the lower half
    of the byte, as in MLX."""
    return codes if bits == 8 else codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: mx.array, bits: int) -> mx.array:
    if bits == 8:
        return packed
    both = mx.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)


def _columns(scales: mx.array) -> tuple[mx.array, mx.array]:
    """Return scales and biases in fp32, (..., groups, 1)."""
    wide = scales.astype(mx.float32)[..., None]
    return wide[0], wide[1]
