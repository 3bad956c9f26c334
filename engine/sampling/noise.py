"""Noise that depends on a request's seed and an output position, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import mlx.core as mx

SMALLEST = 1e-37
"""Of float32's normal numbers."""


def key(seed: int, output_index: int) -> tuple[int, int]:
    """The random key, two 32-bit words, of output number ``output_index``."""
    digest = _digest(seed, output_index, b"token-noise")
    return digest & (2**32 - 1), digest >> 32


def coin(seed: int, output_index: int) -> float:
    """A number in [0, 1) for what is decided once for a whole output, apart from `key`."""
    return _digest(seed, output_index, b"coin") / 2**64


def uniform(keys: Sequence[tuple[int, int]], vocab_size: int) -> mx.array:
    """Numbers in [0, 1), (rows, vocab_size), one key a row."""
    draw = mx.vmap(lambda row: mx.random.uniform(shape=(vocab_size,), key=row))
    numbers: mx.array = draw(mx.array(keys, mx.uint32))
    return numbers


def gumbel(xp: Any, uniform: Any) -> Any:
    """Gumbel noise out of numbers in [0, 1). The argmax of logits plus this noise is a
    sample of their softmax. It is finite also for 0: the token may be the only one allowed."""
    return -xp.log(-xp.log(xp.maximum(uniform, SMALLEST)))


def _digest(seed: int, output_index: int, purpose: bytes) -> int:
    data = (seed % 2**64).to_bytes(8, "little") + output_index.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8, person=purpose).digest(), "little")
