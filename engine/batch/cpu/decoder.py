"""Decoders like Llama's in NumPy, for fp32 on the CPU: a pass without MLX.

On Linux MLX computes everything but matmuls with one thread. Each operation of a graph costs
several microseconds to build and to dispatch, and so does each way out of the graph and back.
NumPy's wheels contain an OpenBLAS that multiplies few rows by a large weight faster than MLX's
BLAS. So a model that consists only of the layers below is computed here, on the model's own
weights, and directly into the slabs.

Arrays are (tokens, ...): rows of a prefill are packed one after the other without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx import nn

from engine.backend.threads import num_threads, numpy_threads
from engine.batch.cpu.gates import silu_times
from engine.batch.cpu.host import HostBatch
from engine.batch.cpu.products import Products
from engine.batch.cpu.rotary import Rotary, Unsupported
from engine.batch.cpu.together import Together
from engine.batch.ragged import Row
from engine.cache.layout import KVNode, Layout
from engine.cache.rounding import Array, Arrays
from engine.cache.slabs import Slabs

FAMILY = ("llama", "qwen2", "qwen3")
"""Modules of mlx-lm whose `Model` can be computed by `Decoder`."""
FEW_ROWS = 64
"""Up to so many rows are stored by columns, as products of a few rows often are."""


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Array
    eps: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        _expect(module, nn.RMSNorm)
        return cls(np.asarray(module.weight), module.eps)

    def __call__(self, x: Array) -> Array:
        scale = np.einsum("...d,...d->...", x, x)
        scale /= x.shape[-1]
        scale += self.eps
        np.sqrt(scale, out=scale)
        out: Array = x / scale[..., None]
        out *= self.weight
        return out


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer."""

    products: Products
    weight: Array  # (out, in)
    bias: Array | None = None  # (out,)

    @classmethod
    def of(cls, products: Products, *modules: Any) -> _Linear:
        """Join ``modules`` side by side.

        Their weights become parts of one array, which replaces the old ones."""
        for module in modules:
            _expect(module, nn.Linear)
        if len(modules) > 1:
            whole = mx.concatenate([module.weight for module in modules])
            ends = list(accumulate(len(module.weight) for module in modules))
            for module, start, end in zip(modules, [0, *ends], ends, strict=False):
                module.weight = whole[start:end]
            mx.eval(whole, [module.weight for module in modules])
        else:
            whole = modules[0].weight
        biases = [np.asarray(module.bias) for module in modules if "bias" in module]
        if len(biases) not in (0, len(modules)):
            raise Unsupported("some of its layers have a bias and others do not")
        return cls(products, np.asarray(whole), np.concatenate(biases) if biases else None)

    def __call__(self, x: Array) -> Array:
        """Return (rows, out) for (rows, in), in memory by rows or by columns, as is faster."""
        out = self.products(x, self.weight)
        if self.bias is not None:
            out += self.bias
        return out


class _Layer:
    def __init__(self, block: Any, rotary: Rotary, products: Products) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.before_attention = _Norm.of(block.input_layernorm)
        self.before_mlp = _Norm.of(block.post_attention_layernorm)
        self.heads, self.kv_heads = attention.n_heads, attention.n_kv_heads
        self.scale = np.float32(attention.scale)
        self.qkv = _Linear.of(products, attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = _Linear.of(products, attention.o_proj)
        self.gate_up = _Linear.of(products, mlp.gate_proj, mlp.up_proj)
        self.down = _Linear.of(products, mlp.down_proj)
        self.norms = None
        if "q_norm" in attention:
            self.norms = _Norm.of(attention.q_norm), _Norm.of(attention.k_norm)
        self.rotary = rotary
        self.linears = (self.qkv, self.out, self.gate_up, self.down)

    def attend(self, x: Array, batch: DecoderBatch, number: int, *, last: bool) -> Array | None:
        """Return what attention adds to ``x`` (tokens, hidden).

        With ``last`` only store keys and values, and return None."""
        rotated = self.heads + self.kv_heads
        new = self.qkv(self.before_attention(x))
        new = new.reshape(len(x), rotated + self.kv_heads, -1)
        queries_and_keys, values = new[:, :rotated], new[:, rotated:]
        if self.norms is not None:
            queries_and_keys = np.concatenate(
                [
                    self.norms[0](queries_and_keys[:, : self.heads]),
                    self.norms[1](queries_and_keys[:, self.heads :]),
                ],
                axis=1,
            )
        turned = self.rotary(queries_and_keys, batch.positions)
        queries, keys = turned[:, : self.heads], turned[:, self.heads :]
        batch.store(number, batch.unpacked(keys), batch.unpacked(values))
        if last:
            return None
        queries *= self.scale
        grouped = queries.reshape(len(x), self.kv_heads, self.heads // self.kv_heads, -1)
        shape = (*grouped.shape[:-1], batch.layout.layers[number].value_dim)
        found: Array = np.empty(shape, np.float32)
        window = batch.layout.layers[number].window
        batch.attend_to(number, batch.unpacked(grouped), batch.unpacked(found), window)
        return self.out(found.reshape(len(x), -1))

    def think(self, x: Array) -> Array:
        both = self.gate_up(self.before_mlp(x))
        half = both.shape[1] // 2
        return self.down(silu_times(both[:, :half], both[:, half:]))


class Decoder:
    """Computes passes of ``model``. Raises `Unsupported` if it cannot be computed here."""

    def __init__(self, model: Any, layout: Layout) -> None:
        if model.__class__.__module__ not in {f"mlx_lm.models.{name}" for name in FAMILY}:
            raise Unsupported("it is of another kind")
        if layout.tree != tuple(KVNode(i) for i in range(len(layout.layers))):
            raise Unsupported("it keeps something else than keys and values of each layer")
        inner = model.model
        _expect(inner.embed_tokens, nn.Embedding)
        self._embedding: Array = np.asarray(inner.embed_tokens.weight)
        self.products = products = Products()
        self._head = _Linear(products, self._embedding)
        if not model.args.tie_word_embeddings:
            self._head = _Linear.of(products, model.lm_head)
        self._norm = _Norm.of(inner.norm)
        rotary = Rotary(inner.layers[0].self_attn.rope, layout.layers[0].key_dim)
        for block in inner.layers:
            rotary.check(block.self_attn.rope)
        self._layers = [_Layer(block, rotary, products) for block in inner.layers]
        linears = [self._head, *(linear for layer in self._layers for linear in layer.linears)]
        with numpy_threads(num_threads()):
            products.measure([linear.weight for linear in linears])

    def __call__(self, batch: DecoderBatch, tokens: Array, *, silent: bool) -> Array | None:
        """Return logits (tokens, vocabulary) of the packed ``tokens``, None if ``silent``."""
        with numpy_threads(num_threads()), np.errstate(over="ignore"):
            x: Array = self._embedding[tokens]
            if len(tokens) <= FEW_ROWS:
                x = np.asfortranarray(x)
            end = len(self._layers) - 1
            for number, layer in enumerate(self._layers):
                added = layer.attend(x, batch, number, last=silent and number == end)
                if added is None:
                    return None
                x += added
                x += layer.think(x)
            return self._head(self._norm(x))


class DecoderBatch(HostBatch):
    """A pass of `decoder`, which replaces the model, see `bind`."""

    decoder: ClassVar[Decoder]

    def __init__(self, layout: Layout, slabs: Slabs, rows: Sequence[Row]) -> None:
        super().__init__(layout, slabs, rows)
        self.positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        ends = list(accumulate(row.width for row in rows))
        self._cuts = list(zip([0, *ends], ends, strict=False))
        gemm = self.decoder.products.gemm_batch(len(rows)) if self.decoding else None
        if gemm is not None:
            self._together = Together(gemm, layout, list(self.by_slab()))

    def logits(self, model: Any, inputs: mx.array, *, kv_only: bool = False) -> mx.array:
        given = np.asarray(inputs)
        rows = zip(given, self.rows, strict=True)
        tokens = np.concatenate([ids[: row.width] for ids, row in rows])
        found = self.decoder(self, tokens, silent=kv_only)
        if found is None:
            return mx.zeros((*inputs.shape, 0))
        if tokens.size == given.size:
            return mx.array(found).reshape(*inputs.shape, -1)
        padded = np.zeros((*inputs.shape, found.shape[-1]), np.float32)
        for target, (start, end) in zip(padded, self._cuts, strict=True):
            target[: end - start] = found[start:end]
        return mx.array(padded)

    def unpacked(self, packed: Array) -> Arrays:
        """Return each row's part of ``packed`` (tokens, ..., dim): (..., width, dim)."""
        if self.decoding:
            return packed[..., None, :]
        return [np.moveaxis(packed[start:end], 0, -2) for start, end in self._cuts]


def bind(model: Any, layout: Layout) -> type[DecoderBatch] | None:
    """Return the class of batches for ``model``, None if it cannot be computed here."""
    try:
        decoder = Decoder(model, layout)
    except Unsupported:
        return None
    return type("DecoderBatch", (DecoderBatch,), {"decoder": decoder})


def _expect(module: Any, kind: type[nn.Module]) -> None:
    if type(module) is not kind or module.weight.dtype != mx.float32:
        raise Unsupported(f"a {type(module).__name__} is not a {kind.__name__} in fp32")
