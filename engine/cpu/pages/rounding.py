"""Rounding of keys and values to quantized numbers, in NumPy.

The results equal `engine.cache.quantization`, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backend.threads import in_parallel, num_threads
from engine.cache.quantization import LARGEST, MARGIN, MIDDLE, SMALLEST_SCALE, Quantization

Array = NDArray[np.float32]
Arrays = Array | Sequence[Array]
"""One array for each row of a batch."""
Codes = NDArray[Any]
"""Signed codes of 8 bits, or two codes of 4 bits in each byte, the first in the lower half."""
Scales = NDArray[np.float16]

WORTH_THREADS = 1_024
"""Number of groups above which threads pay off."""


def round_in_place(x: Array, how: Quantization) -> tuple[Codes, Scales]:
    """Round the contiguous ``x`` (..., dim) in place. Return its codes (..., bytes), and its scales
    (1, ..., groups), or scales and biases (2, ..., groups)."""
    if not x.flags.c_contiguous:  # reshaping into groups would copy
        raise ValueError("not contiguous")
    groups = x.reshape(-1, how.group_size)
    codes = np.empty((len(groups), how.code_bytes(how.group_size)), code_type(how))
    scales = np.empty((how.scales, len(groups)), np.float16)
    parts = num_threads() if len(groups) >= WORTH_THREADS else 1
    cuts = [slice(*cut) for cut in pairwise(len(groups) * i // parts for i in range(parts + 1))]
    in_parallel([partial(_round, groups[c], codes[c], scales[:, c], how) for c in cuts])
    shape = x.shape[:-1]
    return codes.reshape(*shape, -1), scales.reshape(how.scales, *shape, -1)


def code_type(how: Quantization) -> type[np.int8 | np.uint8]:
    return np.int8 if how.is_symmetric else np.uint8


def _round(groups: Array, codes: Codes, scales: Scales, how: Quantization) -> None:
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    for extreme in (low, high):  # `np.clip` takes several times as long for few groups
        np.maximum(extreme, -LARGEST, out=extreme)
        np.minimum(extreme, LARGEST, out=extreme)
    # Of elements that are clipped, and of NaN, which has any code and a scale of NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        if how.is_symmetric:
            _round_symmetric(groups, np.maximum(high, -low), codes, scales)
        else:
            _round_between(groups, low, high, codes, scales, how)


def _round_symmetric(groups: Array, largest: Array, codes: Codes, scales: Scales) -> None:
    """Round ``groups`` with elements up to ``largest``, which is overwritten."""
    most = MIDDLE - 1
    largest += most * SMALLEST_SCALE
    largest *= (1 + MARGIN) / most
    scales[0] = largest
    scale = scales[0].astype(np.float32)[:, None]
    groups /= scale
    np.rint(groups, out=groups)
    np.maximum(groups, -most, out=groups)
    np.minimum(groups, most, out=groups)
    codes[...] = groups
    groups *= scale
    groups += 0  # not -0, because codes give 0


def _round_between(
    groups: Array, low: Array, high: Array, codes: Codes, scales: Scales, how: Quantization
) -> None:
    """Round ``groups`` with elements from ``low`` to ``high``, which are overwritten."""
    wide = np.empty((2, len(groups), 1), np.float32)
    low -= np.abs(low) * MARGIN
    scales[1] = low
    wide[1, :, 0] = scales[1]
    high -= wide[1, :, 0]
    high *= (1 + MARGIN) / how.max_code
    high += SMALLEST_SCALE
    scales[0] = high
    wide[0, :, 0] = scales[0]
    groups -= wide[1]
    groups /= wide[0]
    np.rint(groups, out=groups)
    np.maximum(groups, 0, out=groups)
    np.minimum(groups, how.max_code, out=groups)
    whole = groups.astype(np.uint8)
    np.bitwise_or(whole[:, ::2], whole[:, 1::2] << np.uint8(4), out=codes)
    groups *= wide[0]
    groups += wide[1]


def values_of(codes: Codes, scales: Scales, how: Quantization, out: Array) -> None:
    """Write the values of ``codes`` (..., bytes) with their ``scales`` (scales, ..., groups) to
    ``out`` (..., dim)."""
    if how.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    shape = *out.shape[:-1], out.shape[-1] // how.group_size, how.group_size
    groups, wide = out.reshape(shape, copy=False), scales.astype(np.float32)[..., None]
    np.multiply(codes.reshape(shape), wide[0], out=groups)
    if not how.is_symmetric:
        groups += wide[1]
