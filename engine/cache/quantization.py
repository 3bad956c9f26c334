"""Quantization of keys and values, in MLX.

The least and the largest element of each group of neighbouring elements of a head give a
scale and a bias in fp16. An element is kept as an integer, its code, and is read as
``code * scale + bias``.

* The product of a code and a scale has at most 19 bits, which is exact in fp32. So a value
  that is read is one rounding of the same sum on every device and in every library.
* The bias lies a little below the least element, and the scale a little above what is needed.
  So rounding them to fp16 cuts nothing off, and ``|bias| < 2**20 * scale``.
* Therefore codes can be recovered from values that are kept in fp32: ``(value - bias) /
  scale`` is off by less than ``2**-24 * (|bias| / scale + 3 * 255)``, which is under 0.1.

A value that was read is never rounded again, so every value is quantized once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import mlx.core as mx

MIN_GROUP_SIZE = 16
"""With fewer elements, scales and biases take too much memory."""
KERNEL_GROUPS = (32, 64, 128)
"""Group sizes for which MLX has kernels."""

MARGIN = 2.0**-10
"""A relative margin, twice the error of rounding to fp16."""
SMALLEST_SCALE = 2.0**-24
"""The least positive number of fp16, and the rounding error of small numbers."""
LARGEST = 65_000.0
LARGEST_SCALE = 65_504.0


class Quantization(NamedTuple):
    """A way of quantizing heads of one size."""

    bits: int  # bits of a code
    group_size: int  # number of elements that share a scale and a bias

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def code_bytes(self, dim: int) -> int:
        return dim * self.bits // 8

    def scale_bytes(self, dim: int) -> int:
        """Return the bytes of the scales and biases of ``dim`` elements."""
        return 2 * int(mx.float16.size) * (dim // self.group_size)

    def token_bytes(self, dim: int) -> int:
        return self.code_bytes(dim) + self.scale_bytes(dim)


class Precision(NamedTuple):
    """The precision of keys and values that was asked for."""

    bits: int = 16  # bits of an element, 16 for the model's own type
    group_size: int = 64

    def for_dim(self, dim: int) -> Quantization | None:
        """Return the quantization of heads of ``dim`` elements.

        Its group size is halved until it divides ``dim``. None if it would become too small,
        or if nothing is to be quantized."""
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
    """Quantize ``x`` (..., positions, dim). Elements beyond the range of fp16 are clipped."""
    if x.shape[-2] == 1 and mx.default_device() == mx.gpu:
        return Quantized(*compiled_quantize(scheme)(x))
    return _quantize(x, scheme)


@cache
def compiled_quantize(scheme: Quantization) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """Return `quantize` compiled to a few kernels, for decode steps on a GPU.

    MLX compiles it again for each shape."""

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
    """Return the codes of ``values`` (..., dim), which may be dequantized already."""
    scale, bias = _columns(scales)
    groups = values.reshape(*values.shape[:-1], -1, scheme.group_size)
    codes = mx.clip(mx.round((groups - bias) / scale), 0, scheme.max_code)
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
