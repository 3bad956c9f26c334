"""Embeddings of pictures for models whose code does not accept any: the embedding layer returns
them."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
from mlx import nn


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
