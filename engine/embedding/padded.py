"""Passes in MLX, for GPUs and for models that the CPU path does not support: texts of similar
length together, padded on the right."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from engine.backend.device_errors import compute, raise_late_errors
from engine.batch.ragged import embedding_scale
from engine.embedding.heads import Array, States
from engine.model.encoder import Affine, Encoder, EncoderLayer, Text

PIECE_TOKENS = 2048
"""Tokens that a causal decoder computes without interruption."""
_SMALLEST_CLASS = 16


class PaddedModel:
    """Computes hidden states of texts in batches of one class of lengths."""

    def __init__(
        self, forward: Callable[[Sequence[Text], int], Generator[mx.array, None, mx.array]]
    ) -> None:
        """``forward`` computes (texts, width, hidden) for the given width, and yields arrays that
        can be evaluated before it continues."""
        self._forward = forward

    def states(self, texts: Sequence[Text]) -> Generator[None, None, States]:
        """Compute the states of ``texts``, in several parts."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found: dict[int, Array] = {}
        for width, members in groupby(order, key=lambda i: length_class(len(texts[i]))):
            numbers = list(members)
            work = self._forward([texts[i] for i in numbers], width)
            while True:
                try:
                    # The next pass might be another, and get an error of this one.
                    compute(next(work))
                except StopIteration as done:
                    states = np.asarray(done.value.astype(mx.float32))
                    raise_late_errors()
                    break
                yield
            found |= {i: states[row, : len(texts[i])] for row, i in enumerate(numbers)}
        return [found[i] for i in range(len(texts))]


def length_class(length: int) -> int:
    """Return the width to which a text of ``length`` is padded: at most a quarter more."""
    width = _SMALLEST_CLASS
    while width < length:
        width += max(_SMALLEST_CLASS, 1 << (width.bit_length() - 3))
    return width


def _tokens(texts: Sequence[Text], width: int) -> mx.array:
    padded = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text.token_ids
    return mx.array(padded)


def _mask(texts: Sequence[Text], width: int, reach: int | None) -> mx.array:
    """Return the mask of the tokens of a text, (texts, 1, width or 1, width). Rows of padding see
    the first token, because every row needs one."""
    lengths = mx.array([len(text) for text in texts])
    at = mx.arange(width)
    real = (at < lengths[:, None])[:, None, None]
    if reach is None:
        return real
    near = mx.abs(at[:, None] - at) <= reach
    return (real & near) | ((at == 0) & (at[:, None] >= lengths[:, None, None])[:, None])


# -- decoders of mlx-lm --------------------------------------------------------


def padded_decoder(model: Any, *, causal: bool) -> PaddedModel:
    """Return passes of a model of mlx-lm. Padding comes after all real tokens, which never see it
    in a causal model."""

    def forward(texts: Sequence[Text], width: int) -> Generator[mx.array, None, mx.array]:
        tokens = _tokens(texts, width)
        if causal and width <= PIECE_TOKENS:
            states: mx.array = model.model(tokens)
            yield states
            return states
        if causal:
            cache, pieces = make_prompt_cache(model), []
            for start in range(0, width, PIECE_TOKENS):
                pieces.append(model.model(tokens[:, start : start + PIECE_TOKENS], cache=cache))
                yield pieces[-1]
            return mx.concatenate(pieces, axis=1)
        inner = model.model
        x = inner.embed_tokens(tokens)
        scale = float(embedding_scale(model))
        x = x if scale == 1 else x * mx.array(scale, x.dtype)
        half = (getattr(model.args, "sliding_window", None) or 0) // 2
        masks = {sliding: _mask(texts, width, half if sliding else None) for sliding in (0, 1)}
        for layer in inner.layers:
            sliding = half > 0 and getattr(layer.self_attn, "is_sliding", False)
            x = layer(x, masks[sliding], None)
            yield x
        return inner.norm(x)

    return PaddedModel(forward)


# -- encoders ------------------------------------------------------------------


def padded_encoder(encoder: Encoder) -> PaddedModel:
    """Return passes of ``encoder``."""
    dim = encoder.hidden // encoder.heads

    def forward(texts: Sequence[Text], width: int) -> Generator[mx.array, None, mx.array]:
        x = _embedded(encoder, texts, width)
        reaches = {layer.reach for layer in encoder.layers}
        masks = {reach: _mask(texts, width, reach) for reach in reaches}
        for layer in encoder.layers:
            x = _layer(encoder, layer, x, masks[layer.reach], dim)
            yield x
        return x if encoder.final_norm is None else _norm(x, encoder.final_norm, encoder.eps)

    return PaddedModel(forward)


def _embedded(encoder: Encoder, texts: Sequence[Text], width: int) -> mx.array:
    x = encoder.word[_tokens(texts, width)]
    if encoder.position is not None:
        last = encoder.position.shape[0] - 1  # of padding, whose states are not used
        x = x + encoder.position[mx.minimum(mx.arange(width) + encoder.first_position, last)]
    if encoder.type is not None:
        starts = mx.array([text.second_start or width for text in texts])
        second = (mx.arange(width) >= starts[:, None]).astype(mx.int32)
        x = x + encoder.type[second if encoder.type.shape[0] > 1 else 0 * second]
    return _norm(x, encoder.embed_norm, encoder.eps)


def _layer(
    encoder: Encoder, layer: EncoderLayer, x: mx.array, mask: mx.array, dim: int
) -> mx.array:
    eps, before = encoder.eps, encoder.pre_norm
    normed = _norm(x, layer.attn_norm, eps) if before else x
    batch, width, _ = x.shape
    qkv = _linear(normed, layer.qkv).reshape(batch, width, 3, encoder.heads, dim)
    queries, keys, values = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    if layer.rope_theta is not None:
        rotation = {"traditional": False, "base": layer.rope_theta, "scale": 1.0, "offset": 0}
        queries, keys = (mx.fast.rope(each, dim, **rotation) for each in (queries, keys))
    found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=dim**-0.5, mask=mask)
    x = x + _linear(found.transpose(0, 2, 1, 3).reshape(batch, width, -1), layer.out)
    x = x if before else _norm(x, layer.attn_norm, eps)
    x = x + _mlp(encoder, layer, _norm(x, layer.mlp_norm, eps) if before else x)
    return x if before else _norm(x, layer.mlp_norm, eps)


def _mlp(encoder: Encoder, layer: EncoderLayer, x: mx.array) -> mx.array:
    kinds = {"gelu": nn.gelu, "gelu_tanh": nn.gelu_approx, "relu": nn.relu, "silu": nn.silu}
    activate, up = kinds[encoder.activation], _linear(x, layer.up)
    if encoder.gated:
        gate, up = mx.split(up, 2, axis=-1)
        return _linear(activate(gate) * up, layer.down)
    return _linear(activate(up), layer.down)


def _linear(x: mx.array, layer: Affine) -> mx.array:
    out = x @ layer.weight.T
    return out if layer.bias is None else out + layer.bias


def _norm(x: mx.array, norm: Affine | None, eps: float) -> mx.array:
    return x if norm is None else mx.fast.layer_norm(x, norm.weight, norm.bias, eps)
