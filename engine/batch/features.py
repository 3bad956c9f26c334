"""Features of pictures that are added to the outputs of a language model's first layers.

Source: "DeepStack: Deeply Stacking Visual Tokens is Surprisingly Simple and Effective for LMMs"
(2024).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn


class DeepLayer(nn.Module):  # type: ignore[misc]
    """A layer of a language model to whose output features of pictures are added."""

    def __init__(self, layer: Any, number: int) -> None:
        super().__init__()
        self.layer, self.number = layer, number

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        out: mx.array = self.layer(x, mask, cache)
        given = cache.batch.given
        if given is not None:
            places = mx.array(given.places)
            out[0, places] = out[0, places] + given.deep[self.number].astype(out.dtype)
        return out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def take_features(model: Any, layers: int) -> None:
    """Make the first ``layers`` of a language model add features of pictures to their outputs."""
    inner = getattr(model, "language_model", model).model
    for number in range(layers):
        inner.layers[number] = DeepLayer(inner.layers[number], number)
