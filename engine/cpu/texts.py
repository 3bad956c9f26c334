"""Passes on a CPU without padding: the tokens of all texts one after the other.

Everything between two attentions is one call of ONNX Runtime for all tokens. Attention is computed
text by text, so that the shapes of its products depend only on the text: with one operator
(`FusedAttention`) if every token sees all others, and otherwise in NumPy. The bits of a row
therefore do not depend on the other texts of its pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mlx import nn

from engine.backend.threads import in_parallel, num_threads
from engine.batch.ragged import embedding_scale
from engine.cache.layout import UnsupportedLayout, probe_layout
from engine.cpu.decoder import stretches
from engine.cpu.decoder.blocks import Norm, TransformerBlock
from engine.cpu.decoder.decoder import knows, rotaries
from engine.cpu.decoder.rotary import Rotary
from engine.cpu.onnx.graphs import CONTRIB, Bound, Graph, Session, Unsupported
from engine.cpu.onnx.quantized import SameBits, of_all
from engine.cpu.onnx.weights import Embedding
from engine.cpu.pages.rounding import Array
from engine.model.encoder import Affine, Encoder, Text

logger = logging.getLogger(__name__)

States = list[Array]
"""The hidden states of each text, (tokens, hidden)."""
_SCORES_AT_ONCE = 1 << 20
"""Max size of the scores of all heads in a piece of work: 4 MB."""
_MIN_ROWS = 64
"""Number of queries of a text that justify a piece of work."""


@dataclass(frozen=True)
class Attention:
    """How the tokens of a layer see each other."""

    heads: int
    kv_heads: int
    before: int | None = None  # max distance to earlier tokens; None: unlimited
    after: int | None = None  # max distance to later tokens
    softcap: float | None = None
    fused: FusedAttention | None = None  # it computes the attention, of queries as they are


class PackedModel:
    """Computes hidden states of packed texts."""

    def __init__(
        self,
        embed: Callable[[Sequence[Text]], Array],
        stretches: Sequence[Session],
        layers: Sequence[Attention],
        rotaries: Sequence[Rotary | None],
        same_bits: SameBits = "any",
    ) -> None:
        """``stretches`` are the computations before, between and after the layers' attentions."""
        self._embed, self._stretches, self._layers = embed, stretches, layers
        self._rotaries, self._same_bits = rotaries, same_bits

    def states(self, texts: Sequence[Text]) -> Generator[None, None, States]:
        """Compute the states of ``texts`` layer by layer."""
        cuts = list(pairwise([0, *accumulate(map(len, texts))]))
        positions = np.concatenate([np.arange(len(text)) for text in texts])
        x, count = self._embed(texts), len(positions)
        if self._same_bits == "even" and count % 2:
            x, positions = np.concatenate([x, x[:1]]), np.append(positions, 0)
        tables: dict[Rotary | None, Sequence[Array]] = {
            rotary: rotary.tables(positions) if rotary is not None and rotary.turned else ()
            for rotary in set(self._rotaries)
        }
        x, *asked = self._stretches[0](x, *tables[self._rotaries[0]])
        for number, layer in enumerate(self._layers):
            found = (
                attend(layer, cuts, *asked) if layer.fused is None else layer.fused(cuts, *asked)
            )
            if number + 1 == len(self._layers):
                break
            turns = tables[self._rotaries[number + 1]]
            x, *asked = self._stretches[number + 1](x, found, *turns)
            yield
        (last,) = self._stretches[-1](x, found)
        return [last[start:end] for start, end in cuts]


def attend(
    layer: Attention,
    cuts: Sequence[tuple[int, int]],
    queries: Array,
    keys: Array,
    values: Array,
) -> Array:
    """Return the attention of each text's tokens, (tokens, heads * dim), for scaled queries."""
    count, heads, kv_heads = len(queries), layer.heads, layer.kv_heads
    asked = queries.reshape(count, kv_heads, heads // kv_heads, -1)
    keys, values = keys.reshape(count, kv_heads, -1), values.reshape(count, kv_heads, -1)
    found: Array = np.empty((count, kv_heads, heads // kv_heads, values.shape[-1]), np.float32)
    found[cuts[-1][1] :] = 0
    pieces: list[tuple[int, int, int, int]] = []
    threads = num_threads()
    for start, end in cuts:  # a single text has work for all threads
        share = max(_MIN_ROWS, -(-(end - start) // threads))
        rows = max(16, min(share, _SCORES_AT_ONCE // (heads * (end - start))))
        pieces += [(start, end, at, min(at + rows, end)) for at in range(start, end, rows)]

    def work(share: Sequence[tuple[int, int, int, int]]) -> None:
        for start, end, first, last in share:
            found[first:last] = _attended(
                layer, asked[first:last], keys[start:end], values[start:end], first - start
            )

    shares = _shared(pieces, threads)
    in_parallel([lambda share=share: work(share) for share in shares])  # type: ignore[misc]
    return found.reshape(count, -1)


def _attended(layer: Attention, asked: Array, keys: Array, values: Array, at: int) -> Array:
    """Return the attention of a run of queries, (queries, kv_heads, group, dim). The first query
    is at position ``at``."""
    width, length = len(asked), len(keys)
    low = 0 if layer.before is None else max(0, at - layer.before)
    high = length if layer.after is None else min(length, at + width + layer.after)
    keys, values = keys[low:high].transpose(1, 2, 0), values[low:high].transpose(1, 0, 2)
    heads, group = asked.shape[1:3]
    flat = np.ascontiguousarray(asked.transpose(1, 2, 0, 3)).reshape(heads, group * width, -1)
    scores: Array = flat @ keys
    if layer.softcap is not None:
        scores /= layer.softcap
        np.tanh(scores, out=scores)
        scores *= layer.softcap
    if layer.before is not None or layer.after is not None:
        distance = np.arange(low, high) - np.arange(at, at + width)[:, None]
        hidden = np.zeros(distance.shape, bool)
        if layer.before is not None:
            hidden |= distance < -layer.before
        if layer.after is not None:
            hidden |= distance > layer.after
        by_query = scores.reshape(heads, group, width, -1)
        by_query[:, :, hidden] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    result: Array = scores @ values
    result /= total
    return result.reshape(heads, group, width, -1).transpose(2, 0, 1, 3)


def _shared(
    pieces: Sequence[tuple[int, int, int, int]], count: int
) -> list[list[tuple[int, int, int, int]]]:
    """Divide ``pieces`` into shares of about the same cost."""
    shares: list[list[tuple[int, int, int, int]]] = [[] for _ in range(count)]
    costs = [0] * count
    for piece in sorted(pieces, key=lambda p: (p[3] - p[2]) * (p[1] - p[0]), reverse=True):
        least = costs.index(min(costs))
        shares[least].append(piece)
        costs[least] += (piece[3] - piece[2]) * (piece[1] - piece[0])
    return [share for share in shares if share] or [[]]


# -- attention of whole texts --------------------------------------------------


@cache
def _fused_session(heads: int, width: int) -> Session:
    """Return attention of (1, tokens, ``width``) queries, keys and values, all of one length."""
    graph = Graph()
    inputs = [graph.input(name, 1, "tokens", width) for name in ("queries", "keys", "values")]
    found = graph.node("MultiHeadAttention", *inputs, domain=CONTRIB, num_heads=heads)
    graph.output(found, 1, "tokens", width)
    return graph.session()


class FusedAttention:
    """Attention in which every token sees all tokens of its text, with as many heads of keys as of
    queries."""

    def __init__(self, heads: int, width: int) -> None:
        """``width`` is the total width of all heads."""
        self._width = width
        self._bound: Bound = _fused_session(heads, width).bound()

    def __call__(
        self, cuts: Sequence[tuple[int, int]], queries: Array, keys: Array, values: Array
    ) -> Array:
        """Return the attention of each text's tokens, (tokens, width), for unscaled queries.
        ``cuts`` are the first position of each text and its end."""
        asked = [np.ascontiguousarray(each) for each in (queries, keys, values)]
        found: Array = np.empty_like(asked[0])
        found[cuts[-1][1] :] = 0
        row_bytes = found.strides[0]
        for start, end in cuts:
            shape, offset = (1, end - start, self._width), start * row_bytes
            for number, array in enumerate(asked):
                self._bound.input(number, np.float32, shape, array.ctypes.data + offset)
            self._bound.output(0, np.float32, shape, found.ctypes.data + offset)
            self._bound()
        return found


# -- decoders of mlx-lm --------------------------------------------------------


def packed_decoder(model: Any, *, causal: bool) -> PackedModel | None:
    """Return passes of ``model``; None if it cannot be computed here."""
    if not knows(model):
        return None
    try:
        return _packed_decoder(model, causal=causal)
    except (Unsupported, UnsupportedLayout) as reason:
        logger.info("the model is computed in MLX: %s", reason)
        return None


def _packed_decoder(model: Any, *, causal: bool) -> PackedModel:
    layout, inner = probe_layout(model), model.model
    embedding, scale = Embedding(inner.embed_tokens), embedding_scale(model)
    turns = rotaries(
        [block.self_attn.rope for block in inner.layers], [each.key_dim for each in layout.layers]
    )
    blocks = [TransformerBlock(block) for block in inner.layers]
    hidden = inner.norm.weight.shape[0]
    sessions = [stretches.first(hidden, blocks[0], turns[0])]
    for (one, next_), rotary in zip(pairwise(blocks), turns[1:], strict=True):
        sessions.append(stretches.between(hidden, one, next_, rotary))
    sessions.append(stretches.last_states(hidden, blocks[-1], Norm.of(inner.norm)))
    layers = []
    before: int | None
    after: int | None
    for block, kept in zip(blocks, layout.layers, strict=True):
        window = kept.window
        if causal:
            before, after = None if window is None else window - 1, 0
        else:
            before = after = None if window is None else window // 2
        layers.append(Attention(block.heads, block.kv_heads, before, after, block.softcap))

    def embed(texts: Sequence[Text]) -> Array:
        x = embedding.gather(np.concatenate([text.token_ids for text in texts]))
        return x if scale == 1 else x * scale

    return PackedModel(embed, sessions, layers, turns, of_all([each.same_bits for each in blocks]))


# -- encoders ------------------------------------------------------------------


def packed_encoder(encoder: Encoder) -> PackedModel:
    """Return passes of ``encoder``, whose weights are in fp32."""
    dim = encoder.hidden // encoder.heads
    turns: dict[float, Rotary] = {}
    used: list[Rotary | None] = []
    for layer in encoder.layers:
        if layer.rope_theta is not None and layer.rope_theta not in turns:
            rope = nn.RoPE(dim, traditional=False, base=layer.rope_theta)
            turns[layer.rope_theta] = Rotary(rope, dim)
        used.append(None if layer.rope_theta is None else turns[layer.rope_theta])
    numbers = [None, *range(len(encoder.layers)), None]
    sessions = [
        _stretch(encoder, done, next_, None if next_ is None else used[next_])
        for done, next_ in pairwise(numbers)
    ]
    fused = FusedAttention(encoder.heads, encoder.hidden)
    layers = [
        Attention(
            encoder.heads,
            encoder.heads,
            layer.reach,
            layer.reach,
            fused=fused if layer.reach is None else None,
        )
        for layer in encoder.layers
    ]
    return PackedModel(_embedder(encoder), sessions, layers, used)


def _embedder(encoder: Encoder) -> Callable[[Sequence[Text]], Array]:
    word = np.asarray(encoder.word)
    places = None if encoder.position is None else np.asarray(encoder.position)
    kinds = None if encoder.type is None else np.asarray(encoder.type)

    def embed(texts: Sequence[Text]) -> Array:
        x: Array = word[np.concatenate([text.token_ids for text in texts])]
        if places is not None:
            at = np.concatenate([np.arange(len(text)) for text in texts])
            x = x + places[at + encoder.first_position]
        if kinds is not None:
            second = np.concatenate(
                [np.arange(len(t)) >= (t.second_start or len(t)) for t in texts]
            )
            x = x + kinds[second.astype(np.intp) if len(kinds) > 1 else 0 * second]
        return x

    return embed


def _stretch(
    encoder: Encoder, done: int | None, next_: int | None, rotary: Rotary | None
) -> Session:
    """Return the stretch between the attentions of layers ``done`` and ``next_``; None stands
    for before the first or after the last."""
    graph, hidden = Graph(), encoder.hidden
    x = graph.input("x", stretches.ROWS, hidden)
    if done is None:
        x = _norm(graph, x, encoder.embed_norm, encoder.eps)
    else:
        layer = encoder.layers[done]
        found = graph.input("found", stretches.ROWS, hidden)
        x = graph.node("Add", x, _linear(graph, found, layer.out))
        if not encoder.pre_norm:
            x = _norm(graph, x, layer.attn_norm, encoder.eps)
        inner = _norm(graph, x, layer.mlp_norm, encoder.eps) if encoder.pre_norm else x
        x = graph.node("Add", x, _mlp(graph, inner, encoder, done))
        if not encoder.pre_norm:
            x = _norm(graph, x, layer.mlp_norm, encoder.eps)
    if next_ is None:
        if encoder.final_norm is not None:
            x = _norm(graph, x, encoder.final_norm, encoder.eps)
        graph.output(x, stretches.ROWS, hidden)
        return graph.session()
    layer = encoder.layers[next_]
    normed = x
    if encoder.pre_norm and layer.attn_norm is not None:
        normed = _norm(graph, x, layer.attn_norm, encoder.eps)
    qkv = _linear(graph, normed, layer.qkv)
    queries, keys, values = graph.nodes(
        "Split", qkv, graph.integers(hidden, hidden, hidden), outputs=3, axis=1
    )
    dim = hidden // encoder.heads
    if rotary is not None:
        rotate = stretches.rotation(graph, dim, rotary)
        queries, keys = rotate(queries, encoder.heads), rotate(keys, encoder.heads)
    if layer.reach is not None:  # the operator scales queries itself
        queries = graph.node("Mul", queries, graph.number(dim**-0.5))
    graph.output(graph.node("Identity", x) if x == "x" else x, stretches.ROWS, hidden)
    for value in (queries, keys, values):
        graph.output(value, stretches.ROWS, hidden)
    return graph.session()


def _mlp(graph: Graph, x: str, encoder: Encoder, number: int) -> str:
    layer = encoder.layers[number]
    up = _linear(graph, x, layer.up)
    if encoder.gated:
        width = layer.up.weight.shape[0] // 2
        gate, up = graph.nodes("Split", up, graph.integers(width, width), outputs=2, axis=1)
        up = graph.node("Mul", _activated(graph, gate, encoder), up)
    else:
        up = _activated(graph, up, encoder)
    return _linear(graph, up, layer.down)


def _activated(graph: Graph, x: str, encoder: Encoder) -> str:
    match encoder.activation:
        case "relu":
            return graph.node("Relu", x)
        case "silu":
            return graph.node("Mul", x, graph.node("Sigmoid", x))
        case "gelu_tanh":
            return graph.node("FastGelu", x, domain=CONTRIB)
        case "gelu":
            return graph.node("Gelu", x, domain=CONTRIB)


def _linear(graph: Graph, x: str, layer: Affine) -> str:
    out = graph.node("Gemm", x, graph.constant(np.asarray(layer.weight)), transB=1)
    return out if layer.bias is None else graph.node("Add", out, graph.constant(_np(layer.bias)))


def _norm(graph: Graph, x: str, norm: Affine | None, eps: float) -> str:
    if norm is None:
        return x
    bias = np.zeros(norm.weight.shape, np.float32) if norm.bias is None else _np(norm.bias)
    weight = graph.constant(_np(norm.weight))
    return graph.node("LayerNormalization", x, weight, graph.constant(bias), axis=-1, epsilon=eps)


def _np(array: object) -> Array:
    return np.asarray(array, np.float32)
