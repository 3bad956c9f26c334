"""Positions in three axes: time, rows and columns of pictures.

Models with these axes rotate each pair of a head's elements by the position in one of the axes.
Text has the same position in all three, which makes its rotation an ordinary one.

Source: "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution"
(2024), section 2.1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Axes:
    """The positions of a row's new tokens, passed to a model as the offset of its cache."""

    positions: NDArray[np.int64]  # (3, tokens)
    of_pairs: Sequence[int]  # the axis that rotates each pair of a head

    def spread(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Select from ``parts``, arrays (tokens, pairs) for each axis, the axis of each pair."""
        return np.choose(np.array(self.of_pairs)[None], [*parts])


def axes_of_pairs(sections: Sequence[int], *, interleaved: bool) -> list[int]:
    """Return the axis of each pair of a head. ``sections`` are the numbers of pairs per axis,
    either consecutive or interleaved while any are left."""
    found = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if not interleaved:
        return found
    turns = (at % 3 for at in range(len(found)))
    return [axis if at < 3 * sections[axis] else 0 for at, axis in enumerate(turns)]


class AxesRope(nn.Module):  # type: ignore[misc]
    """A model's rotation that also accepts `Axes`."""

    def __init__(self, rope: Any) -> None:
        """``rope`` rotates the first ``rope.dims`` elements of a head: elements of the first
        half with those of the second half, or, if it is traditional, each element with its
        neighbour."""
        super().__init__()
        self.rope = rope

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if not isinstance(offset, Axes):
            found: mx.array = self.rope(x, offset=offset)
            return found
        half = len(offset.of_pairs)
        speeds = self.rope.scale * self.rope.base ** (-np.arange(half) / half)
        angles = offset.spread([each[:, None] * speeds for each in offset.positions])
        cosines, sines = (
            mx.array(turn(angles).astype(np.float32)).astype(x.dtype) for turn in (np.cos, np.sin)
        )
        rest = x[..., 2 * half :]
        if self.rope.traditional:
            first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
        else:
            first, second = x[..., :half], x[..., half : 2 * half]
        turned = [first * cosines - second * sines, second * cosines + first * sines]
        if self.rope.traditional:
            turned = [mx.stack(turned, axis=-1).flatten(-2)]
        return mx.concatenate([*turned, rest], axis=-1)


def take_axes(model: Any, pairs: int) -> None:
    """Make the layers of a language model accept `Axes` of ``pairs`` pairs as offsets. Raises:
    ValueError if they rotate in another way than `AxesRope`."""
    inner = getattr(model, "language_model", model)
    for layer in inner.model.layers:
        attention = getattr(layer, "self_attn", None)
        if attention is None:  # a recurrent layer
            continue
        rope = attention.rope
        if not isinstance(rope, nn.RoPE):
            raise ValueError(f"a {type(rope).__name__} has no positions in three axes")
        if rope.dims != 2 * pairs:
            raise ValueError(
                f"a head rotates {rope.dims} elements, but its sections have {2 * pairs}"
            )
        attention.rope = AxesRope(rope)
