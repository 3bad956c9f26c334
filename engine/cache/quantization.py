"""Quantized keys and values: what they are rounded to, in MLX.

Of each group of neighbouring elements of a head the least and the largest give a scale
and a bias in fp16; an element is kept as an integer, its code: ``code * scale + bias``.

* The product of a code and a scale has at most 19 bits: exact in fp32. So what is read is
  one rounding of the same sum on every device and in every library.
* The bias lies a little below the least element, the scale a little above what is needed:
  rounding them to fp16 cuts nothing off, and ``|bias| < 2**20 * scale``.
* Therefore codes can be had back from values that are kept in fp32: ``(value - bias) /
  scale`` is off by less than ``2**-24 * (|bias| / scale + 3 * 255)``, which is under 0.1.

What is quantized once is never quantized again; nobody rounds a value that was read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import mlx.core as mx

MIN_GROUP_SIZE = 16
"""With fewer elements scales and biases weigh too much."""
KERNEL_GROUPS = (32, 64, 128)
"""Those for which MLX has kernels."""

MARGIN = 2.0**-10
"""Relative: twice what rounding to fp16 may take off."""
SMALLEST_SCALE = 2.0**-24
"""The least number of fp16, and what rounding may take off of small ones."""
LARGEST = 65_000.0
LARGEST_SCALE = 65_504.0


class Quantization(NamedTuple):
    """``bits`` of a code, and how many elements share a scale and a bias."""

    bits: int
    group_size: int

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def code_bytes(self, dim: int) -> int:
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        """Bytes of the scales and biases of ``dim`` elements."""
        return 2 * int(mx.float16.size) * (dim // self.group_size)

    def token_bytes(self, dim: int) -> int:
        return self.code_bytes(dim) + self.scale_bytes(dim)


class Precision(NamedTuple):
    """How keys and values are kept, as asked for; 16 ``bits`` are the model's own type."""

    bits: int = 16
    group_size: int = 64

    def for_dim(self, dim: int) -> Quantization | None:
        """For heads of ``dim`` elements: with groups of a power of two that divide it, or
        None where they would have to be too small, or nothing is to be quantized."""
        if self.bits == 16 or not dim:
            return None
        size = self.group_size
        while dim % size and size > MIN_GROUP_SIZE:
            size //= 2
        return None if dim % size else Quantization(self.bits, size)


UNQUANTIZED = Precision()


class Quantized(NamedTuple):
    """``codes`` (..., dim) in uint8, one each whatever their bits; ``scales`` (2, ...,
    groups) in fp16: the scales, then the biases."""

    codes: mx.array
    scales: mx.array


def quantize(x: mx.array, scheme: Quantization) -> Quantized:
    """Of ``x`` (..., positions, dim). What is larger than fp16 is cut off."""
    if x.shape[-2] == 1 and mx.default_device() == mx.gpu:
        return Quantized(*compiled_quantize(scheme)(x))
    return _quantize(x, scheme)


@cache
def compiled_quantize(scheme: Quantization) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """The same in a few kernels, for decode steps on a GPU: made anew for each shape."""

    def run(x: mx.array) -> tuple[mx.array, mx.array]:
        codes, scales = _quantize(x, scheme)
        return codes, scales

    compiled: Callable[[mx.array], tuple[mx.array, mx.array]] = mx.compile(run)
    return compiled


def _quantize(x: mx.array, scheme: Quantization) -> Quantized:
    groups = x.astype(mx.float32).reshape(*x.shape[:-1], -1, scheme.group_size)
    low = mx.maximum(groups.min(axis=-1), -LARGEST)
    high = mx.maximum(groups.max(axis=-1), low)
    bias = mx.minimum(low - mx.abs(low) * MARGIN, LARGEST).astype(mx.float16)
    span = high - bias.astype(mx.float32)
    scale = span * ((1 + MARGIN) / scheme.max_code) + SMALLEST_SCALE
    scales = mx.stack([mx.minimum(scale, LARGEST_SCALE).astype(mx.float16), bias])
    codes = codes_of(groups.reshape(x.shape), scales, scheme)
    return Quantized(codes, scales)


def codes_of(values: mx.array, scales: mx.array, scheme: Quantization) -> mx.array:
    """The codes of ``values`` (..., dim), before or after they were rounded to them."""
    scale, bias = _columns(scales)
    groups = values.reshape(*values.shape[:-1], -1, scheme.group_size)
    codes = mx.clip(mx.round((groups - bias) / scale), 0, scheme.max_code)
    return codes.astype(mx.uint8).reshape(values.shape)


def dequantize(quantized: Quantized, scheme: Quantization) -> mx.array:
    """(..., dim) in fp32."""
    codes, scales = quantized
    scale, bias = _columns(scales)
    groups = codes.reshape(*codes.shape[:-1], -1, scheme.group_size)
    return (groups.astype(mx.float32) * scale + bias).reshape(codes.shape)


def fake_quantize(x: mx.array, scheme: Quantization) -> mx.array:
    """``x`` as it is read when it was kept, in its own type."""
    return dequantize(quantize(x, scheme), scheme).astype(x.dtype)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Bytes (..., bytes) of ``codes``; of four bits the first in the lower half, as in MLX."""
    return codes if bits == 8 else codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: mx.array, bits: int) -> mx.array:
    if bits == 8:
        return packed
    both = mx.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)


def _columns(scales: mx.array) -> tuple[mx.array, mx.array]:
    """Scales and biases in fp32, (..., groups, 1)."""
    wide = scales.astype(mx.float32)[..., None]
    return wide[0], wide[1]
