"""The computations of mlx-lm's models between attentions, as parts of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from engine.cpu.decoder.linear import Linear, base_of
from engine.cpu.decoder.mlp import Gate, mlp_of
from engine.cpu.onnx.graphs import CONTRIB, Graph, Unsupported
from engine.cpu.onnx.quantized import SameBits, of_all
from engine.cpu.pages.rounding import Array

GEMMAS = ("mlx_lm.models.gemma2", "mlx_lm.models.gemma3_text")
"""Modules whose `RMSNorm` adds 1 to its weight, and which use GELU instead of SiLU."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of vectors or of each head."""

    weight: Array
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        kind = type(module)
        if module.weight.dtype != mx.float32:
            raise Unsupported(f"its norms are in {module.weight.dtype}")
        if kind is nn.RMSNorm:
            return cls(np.array(module.weight), module.eps)
        if kind.__name__ == "RMSNorm" and kind.__module__ in GEMMAS:
            return cls(np.asarray(module.weight) + np.float32(1), module.eps)
        raise Unsupported(f"a {kind.__name__} is not a supported norm")

    def add(self, graph: Graph, x: str) -> str:
        weight = graph.constant(self.weight)
        return graph.node("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=self.eps)

    def add_heads(self, graph: Graph, x: str, width: int) -> str:
        """Normalize ``x`` (rows, width), per head if the weight has the size of a head."""
        dim = len(self.weight)
        if dim == width:
            return self.add(graph, x)
        heads = graph.node("Reshape", x, graph.integers(-1, width // dim, dim))
        return graph.node("Reshape", self.add(graph, heads), graph.integers(-1, width))


class TransformerBlock:
    """A layer of a model: norms, projections, MLP. ``owned`` are the modules it replaces."""

    same_bits: SameBits
    """The numbers of rows for which a row has the same bits."""

    def __init__(self, block: Any) -> None:
        attention = block.self_attn
        self.heads = int(_named(attention, "n_heads", "num_heads", "num_attention_heads"))
        self.kv_heads = int(_named(attention, "n_kv_heads", "num_key_value_heads"))
        self.scale = float(_named(attention, "scale", "sm_scale"))
        """The factor of queries that is left for the graph."""
        self.softcap: float | None = getattr(attention, "attn_logit_softcapping", None)
        self.sinks = _sinks(attention, self.kv_heads)
        self.residual_multiplier = float(getattr(block, "residual_multiplier", 1))
        qkv = _present(attention, "qkv_proj") or _present(attention, "q_proj", "k_proj", "v_proj")
        self.qkv, self.out = Linear.of(*qkv), Linear.of(attention.o_proj)
        self._mlp = mlp_of(block, Gate("gelu" if type(block).__module__ in GEMMAS else "silu"))
        self.head_norms = [Norm.of(norm) for norm in _present(attention, "q_norm", "k_norm")]
        self._scale_queries()
        linears = self.qkv.weight.same_bits, self.out.weight.same_bits
        self.same_bits = of_all([*linears, self._mlp.same_bits])
        self.owned = [*map(base_of, (*qkv, attention.o_proj)), *self._mlp.owned]
        norm = {name: Norm.of(module) for name, module in block.items() if "layernorm" in name}
        self.before_attention = norm.get("input_layernorm")
        self.after_mlp = norm.get("post_feedforward_layernorm")
        after = norm.get("post_attention_layernorm")
        # If there is a norm after the MLP, this one follows attention, whatever its name in Llama.
        self.after_attention = after if self.after_mlp else None
        self.before_mlp = norm.get("pre_feedforward_layernorm") if self.after_mlp else after

    def _scale_queries(self) -> None:
        """Multiply what makes the queries by the scale, if possible, so that they need not be."""
        if self.head_norms:
            first, *others = self.head_norms
            scaled = replace(first, weight=first.weight * np.float32(self.scale))
            self.head_norms, self.scale = [scaled, *others], 1.0
        elif self.qkv.divisible:
            self.qkv = self.qkv.scaled(0, self.heads * self.head_dim, self.scale)
            self.scale = 1.0

    @property
    def head_dim(self) -> int:
        return self.qkv.weight.shape[0] // (self.heads + 2 * self.kv_heads)

    def add_attention_out(self, graph: Graph, found: str) -> str:
        """Return what attention adds to the residual."""
        return self._scaled(graph, self.out.add(graph, found), self.after_attention)

    def add_mlp(self, graph: Graph, x: str) -> str:
        """Return what the MLP adds to the residual, for the normalized ``x``."""
        return self._scaled(graph, self._mlp.add(graph, x), self.after_mlp)

    def _scaled(self, graph: Graph, added: str, norm: Norm | None) -> str:
        if norm is not None:
            added = norm.add(graph, added)
        if self.residual_multiplier != 1:
            factor = graph.number(self.residual_multiplier)
            added = graph.node("Mul", added, factor)
        return added


def _named(module: Any, *names: str) -> Any:
    """Return the attribute of ``module`` with one of these names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _sinks(attention: Any, kv_heads: int) -> Array | None:
    """Return additional scores in softmax (kv_heads, queries of a kv head, 1, 1)."""
    if "sinks" not in attention:
        return None
    return np.asarray(attention.sinks.astype(mx.float32)).reshape(kv_heads, -1, 1, 1)


def _present(module: Any, *names: str) -> Sequence[Any]:
    """Return the parts of ``module`` with these names, empty if one is missing."""
    return [module[name] for name in names] if all(name in module for name in names) else []


def add_residual(graph: Graph, x: str, added: str, norm: Norm | None) -> tuple[str, str]:
    """Return ``x`` + ``added``, and its normalized form under ``norm``."""
    if norm is None:
        whole = graph.node("Add", x, added)
        return whole, whole
    normed, _, _, whole = graph.nodes(
        "SkipSimplifiedLayerNormalization",
        x,
        added,
        graph.constant(norm.weight),
        outputs=4,
        domain=CONTRIB,
        epsilon=norm.eps,
    )
    return whole, normed
