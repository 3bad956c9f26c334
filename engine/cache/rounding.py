"""Rounding of keys and values to quantized numbers, in NumPy.

The results equal `engine.cache.quantization`, operation by operation. Codes are not needed, because
slots keep the dequantized values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from engine.backend.threads import in_parallel, num_threads
from engine.cache.quantization import LARGEST, MARGIN, MIDDLE, SMALLEST_SCALE, Quantization

Array = NDArray[np.float32]
Arrays = Array | Sequence[Array]
"""One array for each row of a batch."""
Scales = NDArray[np.float16]


WORTH_THREADS = 1_024
"""Number of groups above which threads pay off."""


class Kept(NamedTuple):
    """The keys or values of a batch as slabs store them."""

    values: Arrays  # (kv_heads, width, dim) of each row
    scales: Scales | Sequence[Scales] | None
    """(2, kv_heads, width, groups) of each row, None if nothing is quantized."""


def keep(
    keys: Arrays, values: Arrays, how_keys: Quantization | None, how_values: Quantization | None
) -> tuple[Kept, Kept]:
    """Round a copy of ``keys`` and ``values`` if they are quantized.

    Keys and values of the same shape are rounded together, because with few rows the calls take
    longer than the arithmetic."""
    if how_keys is None or how_keys != how_values or _shape(keys) != _shape(values):
        return _keep(keys, how_keys), _keep(values, how_values)
    if isinstance(keys, np.ndarray):
        both = _together(keys, cast(Array, values))
        scales = np.moveaxis(round_in_place(both, how_keys), 0, 2)
        return Kept(both[0], scales[0]), Kept(both[1], scales[1])
    pairs = [_together(*pair) for pair in zip(keys, values, strict=True)]
    marks = [np.moveaxis(round_in_place(pair, how_keys), 0, 1) for pair in pairs]
    first, second = ([pair[i] for pair in pairs] for i in (0, 1))
    return Kept(first, [mark[0] for mark in marks]), Kept(second, [mark[1] for mark in marks])


def _keep(new: Arrays, how: Quantization | None) -> Kept:
    if how is None:
        return Kept(new, None)
    if isinstance(new, np.ndarray):
        copy: Array = np.array(new, order="C")
        return Kept(copy, np.moveaxis(round_in_place(copy, how), 0, 1))
    own = [np.array(row, order="C") for row in new]
    return Kept(own, [round_in_place(row, how) for row in own])


def _together(keys: Array, values: Array) -> Array:
    """Return a contiguous array (2, ...). `np.stack` would keep the memory order of the axes."""
    both = np.empty((2, *keys.shape), np.float32)
    both[0], both[1] = keys, values
    return both


def _shape(arrays: Arrays) -> tuple[int, ...]:
    """Return the shape of one row. All rows have the same number of heads and the same dim."""
    return arrays[0].shape


def round_in_place(x: Array, how: Quantization) -> Scales:
    """Round the contiguous ``x`` (..., dim) in place and return its scales (2, ..., groups)."""
    _check(x)
    groups = x.reshape(-1, how.group_size)
    scales = np.empty((2, len(groups)), np.float16)
    parts = num_threads() if len(groups) >= WORTH_THREADS else 1
    cuts = [len(groups) * i // parts for i in range(parts + 1)]
    in_parallel([partial(_round, groups[a:b], scales[:, a:b], how) for a, b in pairwise(cuts)])
    return scales.reshape(2, *x.shape[:-1], -1)


def _round(groups: Array, scales: Scales, how: Quantization) -> None:
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    for extreme in (low, high):  # `np.clip` takes several times as long for few groups
        np.maximum(extreme, -LARGEST, out=extreme)
        np.minimum(extreme, LARGEST, out=extreme)
    if how.is_symmetric:
        _round_symmetric(groups, np.maximum(high, -low), scales)
        return
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
    with np.errstate(over="ignore"):  # of elements that are clipped
        groups /= wide[0]
    np.rint(groups, out=groups)
    np.maximum(groups, 0, out=groups)
    np.minimum(groups, how.max_code, out=groups)
    groups *= wide[0]
    groups += wide[1]


def _round_symmetric(groups: Array, largest: Array, scales: Scales) -> None:
    """Round ``groups`` with elements up to ``largest``, which is overwritten."""
    most = MIDDLE - 1
    largest += most * SMALLEST_SCALE
    largest *= (1 + MARGIN) / most
    scales[0] = largest
    np.multiply(scales[0], -MIDDLE, out=scales[1])
    scale = scales[0].astype(np.float32)[:, None]
    with np.errstate(over="ignore"):
        groups /= scale
    np.rint(groups, out=groups)
    np.maximum(groups, -most, out=groups)
    np.minimum(groups, most, out=groups)
    groups *= scale
    groups += 0  # not -0, because codes give 0


def codes_in_place(x: Array, scales: Scales, how: Quantization) -> NDArray[np.uint8]:
    """Return the codes of ``x`` (..., dim), which was rounded to ``scales`` (2, ..., groups).

    ``x`` is contiguous and is overwritten."""
    _check(x)
    groups = x.reshape(*x.shape[:-1], -1, how.group_size)
    wide = scales.astype(np.float32)[..., None]
    groups -= wide[1]
    with np.errstate(invalid="ignore"):  # a model's output may be NaN
        groups /= wide[0]
        np.rint(groups, out=groups)
        return x.astype(np.uint8)


def _check(x: Array) -> None:
    if not x.flags.c_contiguous:  # reshaping into groups would copy
        raise ValueError("not contiguous")
