"""Embeddings of pictures for the tokens of a pass, and models that accept them.

Models whose code takes no embeddings get them from their embedding layer. Features that are added
to the outputs of a language model's first layers are from "DeepStack: Deeply Stacking Visual Tokens
is Surprisingly Simple and Effective for LMMs" (2024).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn

from engine.batch.axes import Axes


class Given(NamedTuple):
    """Embeddings that replace those of tokens, for a pass with one row, or with several if its
    batch `packs_rows`."""

    places: list[int]  # indices of the tokens
    embeddings: mx.array  # (places, hidden), before any scaling by the model
    axes: Axes | None = None  # of all tokens, if positions have three axes
    deep: tuple[
        mx.array, ...
    ] = ()  # (places, hidden), to be added to the output of each of the first layers
    spans: tuple[tuple[int, int], ...] = ()
    """Positions (first, end) of tokens of the only row that attend to all others of their span."""

    @classmethod
    def joined(cls, parts: Sequence[Given], widths: Sequence[int]) -> Given:
        """Return the embeddings of rows with so many tokens, one behind the other. None of the rows
        has `spans`."""
        if len(parts) == 1:
            return parts[0]
        firsts = accumulate(widths[:-1], initial=0)
        places = [
            first + at for first, part in zip(firsts, parts, strict=True) for at in part.places
        ]
        axes = [part.axes for part in parts if part.axes is not None]
        assert len(axes) in (0, len(parts)), "positions of all pictures have the same axes"
        whole = None
        if axes:
            positions = np.concatenate([each.positions for each in axes], axis=-1)
            whole = Axes(positions, axes[0].of_pairs)
        deep = zip(*(part.deep for part in parts), strict=True)
        return cls(
            places,
            mx.concatenate([part.embeddings for part in parts]),
            whole,
            tuple(mx.concatenate(each) for each in deep),
        )


class GivenEmbedding(nn.Module):  # type: ignore[misc]
    """A model's embedding layer, with given embeddings for some tokens of its next call."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self._given: tuple[mx.array, mx.array] | None = None

    def give(self, places: mx.array, embeddings: mx.array) -> None:
        """Make the next call, with one row, return ``embeddings`` at these ``places``."""
        self._given = places, embeddings

    def __call__(self, tokens: mx.array) -> mx.array:
        # This call only: the pass may be suspended in a later layer while others run.
        given, self._given = self._given, None
        found: mx.array = self.embedding(tokens)
        if given is not None:
            places, embeddings = given
            found[0, places] = embeddings.astype(found.dtype)
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("embedding"), name)


def take_embeddings(model: Any) -> None:
    """Make a language model accept embeddings in place of tokens, if its code does not."""
    if "input_embeddings" in inspect.signature(type(model).__call__).parameters:
        return
    inner = getattr(model, "language_model", model).model
    inner.embed_tokens = GivenEmbedding(inner.embed_tokens)


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
