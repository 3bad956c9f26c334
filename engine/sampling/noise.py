"""Noise that depends only on a request's seed and an output position."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

SMALLEST = 1e-37
"""Roughly the smallest normal float32 number."""


def key(seed: int, output_index: int) -> tuple[int, int]:
    """Return the random key, two 32-bit words, of output number ``output_index``."""
    digest = _digest(seed, output_index, b"token-noise")
    return digest & (2**32 - 1), digest >> 32


def coin(seed: int, output_index: int) -> float:
    """Return a number in [0, 1) for a decision about a whole output, independent of `key`."""
    return _digest(seed, output_index, b"coin") / 2**64


def uniform(xp: Any, keys: Sequence[tuple[int, int]], tokens: Any) -> Any:
    """Return numbers in [0, 1) for ``tokens``, ids broadcast to (rows, tokens), with one key per
    row.

    Every array library gives the same numbers. A number is a hash of the token's id and the key,
    with the finalizer of MurmurHash3 (Appleby). For a few tokens it costs nothing, for all of them
    a third of MLX's own random numbers on the CPU."""
    first, second = (xp.array(side, dtype=xp.uint32)[:, None] for side in zip(*keys, strict=True))
    mixed = _mixed(xp, _mixed(xp, tokens.astype(xp.uint32) ^ first) + second)
    return (mixed >> 8).astype(xp.float32) * 2.0**-24


def _mixed(xp: Any, x: Any) -> Any:
    x = (x ^ (x >> 16)) * xp.array(0x85EBCA6B, dtype=xp.uint32)
    x = (x ^ (x >> 13)) * xp.array(0xC2B2AE35, dtype=xp.uint32)
    return x ^ (x >> 16)


def gumbel(xp: Any, uniform: Any) -> Any:
    """Return Gumbel noise from numbers in [0, 1).

    The argmax of logits plus this noise is a sample of their softmax. The noise is finite for 0
    too, because that token may be the only one allowed.
    """
    return -xp.log(-xp.log(xp.maximum(uniform, SMALLEST)))


def _digest(seed: int, output_index: int, purpose: bytes) -> int:
    data = (seed % 2**64).to_bytes(8, "little") + output_index.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8, person=purpose).digest(), "little")
