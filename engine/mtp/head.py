"""The head as a module."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask

from engine.mtp.kinds import HeadKind


class MTPHead(nn.Module):  # type: ignore[misc]  # mlx has no types
    """Predicts the token after next from a hidden state and the next token."""

    def __init__(self, kind: HeadKind, layer: nn.Module, dim: int, eps: float) -> None:
        """``layer``: the decoder layer of the architecture. ``dim``: the size of hidden states."""
        super().__init__()
        self.kind = kind
        self.embedding_norm = nn.RMSNorm(dim, eps)
        self.hidden_norm = nn.RMSNorm(dim, eps)
        self.projection = nn.Linear(2 * dim, dim, bias=False)
        self.layer = layer
        self.final_norm = nn.RMSNorm(dim, eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Return the head's hidden states (batch, width, dim), from which the model's last layer
        computes logits.

        ``embedded`` are the embeddings of tokens, and ``hidden`` the hidden states of the positions
        before them, both (batch, width, dim). ``cache`` is the cache of one layer."""
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        if self.kind.hidden_first:
            parts.reverse()
        x = self.projection(mx.concatenate(parts, axis=-1))
        mask = create_attention_mask(x, cache, return_array=self.kind.masks_are_arrays)
        found: mx.array = self.final_norm(self.layer(x, mask, cache))
        return found


def embed(model: Any, tokens: mx.array) -> mx.array:
    """Return the embeddings of ``tokens`` (batch, width) in ``model``: (batch, width, dim)."""
    found: mx.array = model.model.embed_tokens(tokens)
    return found


def last_layer(model: Any, hidden: mx.array) -> mx.array:
    """Return the logits that ``model`` computes from ``hidden`` states: its own, after its final
    norm, or the head's."""
    layer = model.lm_head if "lm_head" in model else model.model.embed_tokens.as_linear
    logits: mx.array = layer(hidden)
    return logits
