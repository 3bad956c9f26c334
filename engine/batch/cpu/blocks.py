"""What the layers of mlx-lm's models compute between their attentions, as parts of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from engine.backend.graphs import CONTRIB, Graph, Unsupported
from engine.backend.weights import Weight, join, weight_of
from engine.cache.rounding import Array

GEMMAS = ("mlx_lm.models.gemma2", "mlx_lm.models.gemma3_text")
"""Modules with an `RMSNorm` that adds 1 to its weight, and with GELU in place of SiLU."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm of vectors, or of each head."""

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
        raise Unsupported(f"a {kind.__name__} is not a norm that is known here")

    def add(self, graph: Graph, x: str) -> str:
        weight = graph.constant(self.weight)
        return graph.node("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=self.eps)

    def add_heads(self, graph: Graph, x: str, width: int) -> str:
        """Norm ``x`` (rows, width), head by head if the weight is that of a head."""
        dim = len(self.weight)
        if dim == width:
            return self.add(graph, x)
        heads = graph.node("Reshape", x, graph.integers(-1, width // dim, dim))
        return graph.node("Reshape", self.add(graph, heads), graph.integers(-1, width))


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers with the same input, side by side."""

    weight: Weight
    bias: Array | None  # (out,)

    @classmethod
    def of(cls, *modules: Any) -> Linear:
        weight = join([weight_of(module) for module in modules])
        biases = [np.asarray(module.bias) for module in modules if "bias" in module]
        if len(biases) not in (0, len(modules)):
            raise Unsupported("some of its layers have a bias and others do not")
        return cls(weight, np.concatenate(biases) if biases else None)

    def add(self, graph: Graph, x: str) -> str:
        out = self.weight.product(graph, x)
        return out if self.bias is None else graph.node("Add", out, graph.constant(self.bias))


class TransformerBlock:
    """A layer of a model: norms, projections, MLP. ``owned`` are the modules it computes."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.heads, self.kv_heads = attention.n_heads, attention.n_kv_heads
        self.scale = float(attention.scale)
        self.softcap: float | None = getattr(attention, "attn_logit_softcapping", None)
        self.residual_multiplier = float(getattr(block, "residual_multiplier", 1))
        qkv = _present(attention, "qkv_proj") or _present(attention, "q_proj", "k_proj", "v_proj")
        gate_up = _present(mlp, "gate_up_proj") or _present(mlp, "gate_proj", "up_proj")
        self.qkv, self.out = Linear.of(*qkv), Linear.of(attention.o_proj)
        self.gate_up, self.down = Linear.of(*gate_up), Linear.of(mlp.down_proj)
        self.head_norms = [Norm.of(norm) for norm in _present(attention, "q_norm", "k_norm")]
        self.with_gelu = type(block).__module__ in GEMMAS
        self.owned = [*qkv, attention.o_proj, *gate_up, mlp.down_proj]
        norm = {name: Norm.of(module) for name, module in block.items() if "layernorm" in name}
        self.before_attention = norm.get("input_layernorm")
        self.after_mlp = norm.get("post_feedforward_layernorm")
        after = norm.get("post_attention_layernorm")
        # With a norm after the MLP, this one comes after attention, whatever llama's name for it.
        self.after_attention = after if self.after_mlp else None
        self.before_mlp = norm.get("pre_feedforward_layernorm") if self.after_mlp else after

    def add_attention_out(self, graph: Graph, found: str) -> str:
        """Return what attention adds to the residual."""
        return self._scaled(graph, self.out.add(graph, found), self.after_attention)

    def add_mlp(self, graph: Graph, x: str) -> str:
        """Return what the MLP adds to the residual, for the normed ``x``."""
        gate, up = graph.nodes(
            "Split", self.gate_up.add(graph, x), outputs=2, axis=1, num_outputs=2
        )
        if self.with_gelu:
            gate = graph.node("Gelu", gate, approximate="tanh")
        else:
            gate = graph.node("QuickGelu", gate, domain=CONTRIB, alpha=1.0)
        return self._scaled(
            graph, self.down.add(graph, graph.node("Mul", gate, up)), self.after_mlp
        )

    def _scaled(self, graph: Graph, added: str, norm: Norm | None) -> str:
        if norm is not None:
            added = norm.add(graph, added)
        if self.residual_multiplier != 1:
            factor = graph.number(self.residual_multiplier)
            added = graph.node("Mul", added, factor)
        return added


def _present(module: Any, *names: str) -> Sequence[Any]:
    """Return the parts of ``module`` with these names, nothing if one of them is missing."""
    return [module[name] for name in names] if all(name in module for name in names) else []


def add_residual(graph: Graph, x: str, added: str, norm: Norm | None) -> tuple[str, str]:
    """Return ``x`` + ``added``, and that under ``norm``."""
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
