"""Linear layers of mlx-lm's models as parts of graphs, including their adapters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from engine.adapters.layers import Factors
from engine.cpu.decoder.adapted import AdaptedLinear, Layer
from engine.cpu.onnx.graphs import Graph, Unsupported
from engine.cpu.onnx.weights import DenseWeight, Weight, expert_weights, join, weight_of
from engine.cpu.pages.rounding import Array


class _LowRank(NamedTuple):
    """A low-rank update of a weight: ``x @ down @ up`` is added to the product."""

    down: Array  # (in, rank)
    up: Array  # (rank, out)


class _Part(NamedTuple):
    """One linear layer."""

    weight: Weight
    bias: Array | None  # (out,)
    added: _LowRank | None


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers with the same input, side by side."""

    weight: Weight
    bias: Array | None  # (out,)
    added: _LowRank | None
    adapted: tuple[Layer, ...] = ()
    """The layers by name, if requests may name adapters."""

    @classmethod
    def of(cls, *modules: Any) -> Linear:
        joined = cls._joined([_part(module) for module in modules])
        adapted = tuple(layer for module in modules if (layer := _adapted(module)) is not None)
        return replace(joined, adapted=adapted) if len(adapted) == len(modules) else joined

    @classmethod
    def of_experts(cls, *modules: Any) -> list[Linear]:
        """Return the linear layers of each expert."""
        return [cls._joined(parts) for parts in zip(*map(_expert_parts, modules), strict=True)]

    @classmethod
    def _joined(cls, parts: Sequence[_Part]) -> Linear:
        biases = [part.bias for part in parts if part.bias is not None]
        if len(biases) not in (0, len(parts)):
            raise Unsupported("some of its layers have a bias and others do not")
        weight = join([part.weight for part in parts])
        return cls(weight, np.concatenate(biases) if biases else None, _side_by_side(parts))

    @property
    def divisible(self) -> bool:
        """Whether parts of the result can be products of their own, at no more cost."""
        return isinstance(self.weight, DenseWeight) and self.added is None and not self.adapted

    def rows(self, first: int, last: int) -> Linear:
        """Return the layer with outputs ``first`` to ``last`` of a `divisible` one."""
        assert self.divisible and isinstance(self.weight, DenseWeight)
        bias = None if self.bias is None else self.bias[first:last]
        return replace(self, weight=DenseWeight(self.weight.array[first:last]), bias=bias)

    def scaled(self, first: int, last: int, factor: float) -> Linear:
        """Return the layer with outputs ``first`` to ``last`` of a `divisible` one multiplied by
        ``factor``."""
        assert self.divisible and isinstance(self.weight, DenseWeight)
        array, bias = self.weight.array.copy(), self.bias
        array[first:last] *= np.float32(factor)
        if bias is not None:
            bias = bias.copy()
            bias[first:last] *= np.float32(factor)
        return replace(self, weight=DenseWeight(array), bias=bias)

    def add_parts(self, graph: Graph, x: str, widths: Sequence[int]) -> list[str]:
        """Add the layers to ``graph`` and return their results in parts of these ``widths``.

        Dense layers are one product for each part, whose results are not copied again: 2 to 3 % of
        a long prompt."""
        if self.divisible:
            cuts = pairwise([0, *accumulate(widths)])
            return [self.rows(first, last).add(graph, x) for first, last in cuts]
        sizes = graph.integers(*widths)
        return graph.nodes("Split", self.add(graph, x), sizes, outputs=len(widths), axis=1)

    def add(self, graph: Graph, x: str) -> str:
        """Add the layers to ``graph`` and return their results side by side."""
        out = self.weight.product(graph, x)
        if self.added is not None:
            inner = graph.node("MatMul", x, graph.constant(self.added.down))
            more = graph.node("MatMul", inner, graph.constant(self.added.up))
            out = graph.node("Add", out, more)
        if self.adapted:
            part = AdaptedLinear(graph, self.adapted)
            graph.parts.append(part)
            out = part.add(graph, x, out)
        return out if self.bias is None else graph.node("Add", out, graph.constant(self.bias))


def base_of(module: Any) -> Any:
    """Return the layer under an mlx-lm adapter, or ``module`` itself.

    mlx-lm's module is not imported here, because it imports rich, which is slow. If there is an
    adapter, it is already imported."""
    lora = sys.modules.get("mlx_lm.tuner.lora")
    if lora is None:
        return module
    return module.linear if isinstance(module, (lora.LoRALinear, lora.LoRASwitchLinear)) else module


def _adapted(module: Any) -> Layer | None:
    factors: Factors | None = vars(module).get("factors")
    if factors is None:
        return None
    return Layer(module.adapter_name, factors.shape, factors.count, factors.rank)


def _part(module: Any) -> _Part:
    base, added = base_of(module), None
    if base is not module:
        added = _LowRank(_array(module.lora_a), _array(module.scale * module.lora_b))
    bias = _array(base.bias) if "bias" in base else None
    return _fused(weight_of(base), bias, added)


def _expert_parts(module: Any) -> list[_Part]:
    base = base_of(module)
    weights = expert_weights(base)
    downs = ups = biases = None
    if base is not module:
        downs = _array(module.lora_a.swapaxes(1, 2))
        ups = _array(module.scale * module.lora_b.swapaxes(1, 2))
    if "bias" in base:
        biases = _array(base.bias)
    return [
        _fused(
            weight,
            None if biases is None else biases[expert],
            None if downs is None or ups is None else _LowRank(downs[expert], ups[expert]),
        )
        for expert, weight in enumerate(weights)
    ]


def _fused(weight: Weight, bias: Array | None, added: _LowRank | None) -> _Part:
    """Return the layer, with its adapter merged into the weight unless the weight has codes."""
    if added is not None and isinstance(weight, DenseWeight):
        return _Part(DenseWeight(weight.array + (added.down @ added.up).T), bias, None)
    return _Part(weight, bias, added)


def _side_by_side(parts: Sequence[_Part]) -> _LowRank | None:
    """Return the adapters of all ``parts`` side by side; the parts have one input."""
    if not any(part.added for part in parts):
        return None
    downs, ups, ends = [], [], np.cumsum([part.weight.shape[0] for part in parts])
    for part, end in zip(parts, ends, strict=True):
        if part.added is not None:
            up = np.zeros((len(part.added.up), ends[-1]), np.float32)
            up[:, end - part.weight.shape[0] : end] = part.added.up
            downs.append(part.added.down)
            ups.append(up)
    return _LowRank(np.concatenate(downs, axis=1), np.concatenate(ups))


def _array(x: mx.array) -> Array:
    return np.asarray(x.astype(mx.float32))
