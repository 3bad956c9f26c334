"""Embeddings of pictures in models whose code takes none: they come from its own layer."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
from mlx import nn


class GivenEmbedding(nn.Module):  # type: ignore[misc]
    """The layer of a model that embeds tokens, some of which have others in its next call."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self._given: tuple[mx.array, mx.array] | None = None

    def give(self, places: mx.array, embeddings: mx.array) -> None:
        """Have the next call, with one row, return ``embeddings`` at these ``places``."""
        self._given = places, embeddings

    def __call__(self, tokens: mx.array) -> mx.array:
        # Only this call: the pass may be left in a later layer, and others come in between.
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
    """Have a language model take embeddings in place of those of tokens, if its code does not."""
    if "input_embeddings" in inspect.signature(type(model).__call__).parameters:
        return
    inner = getattr(model, "language_model", model).model
    inner.embed_tokens = GivenEmbedding(inner.embed_tokens)
