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
* Values that are kept in 16 bits may belong to several codes. The one that is recovered gives
  the same value again (`codes_of`), so nothing depends on which it is.

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
    groups = x.reshape(*x.shape[:-1], -1, scheme.group_size)
    low, high = _clamped(groups.min(axis=-1)), groups.max(axis=-1)
    bias = _bias(low)
    scales = mx.stack([_scale(low, high, bias, scheme), bias])
    return Quantized(codes_of(x.astype(mx.float32), scales, scheme), scales)


RoundedPair = tuple[mx.array, mx.array, mx.array, mx.array]
"""Keys and values of a layer, rounded, in their own type, and the scales of each."""


@cache
def compiled_rounding(scheme: Quantization) -> Callable[[mx.array, mx.array], RoundedPair]:
    """Return a function that quantizes and dequantizes keys and values (..., dim) of one shape,
    in a few kernels for both. The result is that of `quantize` and `dequantize`.

    MLX traces it again for each shape."""

    def run(keys: mx.array, values: mx.array) -> RoundedPair:
        both = mx.stack([keys, values])
        groups = both.reshape(*both.shape[:-1], -1, scheme.group_size)
        low, high = groups.min(axis=-1), groups.max(axis=-1)
        # The added axis ends a kernel: with more steps MLX would cut it in a worse place.
        bias = _bias(_clamped(low))[None]
        # Stacked by a choice for each element: a kernel computes that along.
        shape = (2, *low.shape)
        low, high, wide = (mx.broadcast_to(x, shape) for x in (low, high, bias))
        is_scale = mx.array([True, False]).reshape(2, *[1] * (low.ndim - 1))
        scales = mx.where(is_scale, _scale(_clamped(low), high, wide, scheme), wide)
        # Every step of a kernel has to have its shape.
        scale, bias = (
            mx.broadcast_to(x.squeeze(0)[..., None], groups.shape).astype(mx.float32)
            for x in mx.split(scales, 2)
        )
        codes = _nearest(groups.astype(mx.float32), scale, bias, scheme)
        rounded = (codes * scale + bias).astype(both.dtype).reshape(both.shape)
        first, second = mx.split(rounded, 2)
        ours, theirs = mx.split(scales, 2, axis=1)
        return first.squeeze(0), second.squeeze(0), ours.squeeze(1), theirs.squeeze(1)

    compiled: Callable[[mx.array, mx.array], RoundedPair] = mx.compile(run)
    return compiled


def _clamped(low: mx.array) -> mx.array:
    return mx.maximum(low.astype(mx.float32), -LARGEST)


def _bias(low: mx.array) -> mx.array:
    """Return the bias, in fp16, of groups whose least element is ``low``."""
    return mx.minimum(low - mx.abs(low) * MARGIN, LARGEST).astype(mx.float16)


def _scale(low: mx.array, high: mx.array, bias: mx.array, scheme: Quantization) -> mx.array:
    """Return the scale, in fp16, of groups with elements from ``low`` to ``high``."""
    span = mx.maximum(high.astype(mx.float32), low) - bias.astype(mx.float32)
    scale = span * ((1 + MARGIN) / scheme.max_code) + SMALLEST_SCALE
    return mx.minimum(scale, LARGEST_SCALE).astype(mx.float16)


def _nearest(groups: mx.array, scale: mx.array, bias: mx.array, scheme: Quantization) -> mx.array:
    """Return the nearest codes to ``groups``, as numbers of fp32."""
    return mx.clip(mx.round((groups - bias) / scale), 0, scheme.max_code)


def codes_of(values: mx.array, scales: mx.array, scheme: Quantization) -> mx.array:
    """Return the codes of ``values`` (..., dim), which may be dequantized already.

    Dequantized values in 16 bits get codes that give the same values again. The nearest code
    does, unless the value is a power of two, where numbers below lie twice as close: then one of
    its neighbours does."""
    scale, bias = _columns(scales)
    groups = values.reshape(*values.shape[:-1], -1, scheme.group_size)
    codes = _nearest(groups.astype(mx.float32), scale, bias, scheme)
    if values.dtype != mx.float32:
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
