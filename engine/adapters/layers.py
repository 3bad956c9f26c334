"""Linear layers of mlx-lm models that apply a pass's adapters to its rows.

A layer needs three more operations, whatever the number of adapters: each row is multiplied by
the factors of its own adapter, which are read in place, and the result is added. Rows without an
adapter read zeros. A pass without adapters is computed as before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from engine.adapters.checkpoint import LowRank, Shape
from engine.backend.device_errors import compute

_OF_EXPERTS = re.compile(r"\bexperts\b")
"""Part of the names of layers that exist once per expert (DBRX)."""
_READ = ("prediction_coefs", "correction_coefs", "_res_proj")
"""Layers whose weights are read directly by the model's code (Gemma 3n, Kimi K3)."""
_rows: ContextVar[mx.array | None] = ContextVar("adapters_of_rows", default=None)
"""The place of each row in the current pass. A divided pass has its own stack
(`engine.batch.layered`), and therefore its own context."""
_GATHERS = not mx.cuda.is_available()
"""Whether factors are read in place. On CUDA, MLX 0.32 compiles that kernel for half a minute, and
cannot launch it for some sizes."""


@contextmanager
def applied(places: Sequence[int]) -> Iterator[None]:
    """Apply the adapters in ``places``, one per row, to everything computed in this context."""
    if not any(places):
        yield
        return
    token = _rows.set(mx.array(places))
    try:
        yield
    finally:
        _rows.reset(token)


class Factors:
    """The factors of one layer for all places. None until some adapter has factors for it."""

    def __init__(self, shape: Shape, count: int, rank: int) -> None:
        self.shape, self.count, self.rank = shape, count, rank
        self._sizes = (count + 1, shape.inputs, rank), (count + 1, rank, shape.outputs)
        self.down: mx.array | None = None  # (places, in, rank)
        self.up: mx.array | None = None  # (places, rank, out)

    def put(self, place: int, factors: LowRank | None) -> None:
        """Replace the factors of ``place``. Raises: RuntimeError if the device cannot; then all
        places keep what they have."""
        before = self.down, self.up
        if factors is None and before[0] is None:
            return
        down, up = (np.zeros(size[1:], np.float32) for size in self._sizes)
        if factors is not None:
            rank = factors.down.shape[1]
            down[:, :rank], up[:rank] = factors.down, factors.up
        # New arrays: passes in progress keep the ones they started with.
        after = [
            mx.slice_update(
                mx.zeros(size) if old is None else old, mx.array(new)[None], mx.array([place]), [0]
            )
            for size, old, new in zip(self._sizes, before, (down, up), strict=True)
        ]
        compute(after)
        self.down, self.up = after


class _Adapted:
    """A linear layer that applies adapters."""

    factors: Factors

    def __call__(self, x: mx.array) -> mx.array:
        found: mx.array = super().__call__(x)  # type: ignore[misc]
        rows, down, up = _rows.get(), self.factors.down, self.factors.up
        if rows is None or down is None or up is None:
            return found
        given = x.reshape(len(rows), -1, x.shape[-1]).astype(mx.float32)
        added = _of_rows(_of_rows(given, down, rows), up, rows)
        return found + added.reshape(found.shape).astype(found.dtype)


def _of_rows(x: mx.array, factors: mx.array, rows: mx.array) -> mx.array:
    """Return the products of ``x`` (rows, width, in) with ``factors`` (places, in, out), each row
    with those of its place in ``rows``."""
    if _GATHERS:
        return mx.gather_mm(x, factors, rhs_indices=rows)
    return x @ factors[rows]


class GraphStore:
    """The factors of layers that MLX's graph computes."""

    def __init__(self, layers: Mapping[str, Factors]) -> None:
        self._layers = layers

    def put(self, place: int, layers: Mapping[str, LowRank]) -> None:
        for name, factors in self._layers.items():
            factors.put(place, layers.get(name))


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of ``model`` that support adapters, by name: all linear layers except
    the last one, which may be the embedding.

    Experts are excluded: their rows are a subset of the pass's tokens, in another order. So are
    a model's own layer classes, which may return something else (AFM 7), and layers whose
    weights its code reads directly."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.QuantizedLinear)
        and not name.endswith(("lm_head", *_READ))
        and not _OF_EXPERTS.search(name)
        and not type(module).__module__.startswith("mlx_lm.")
    }


def shape_of(module: Any) -> Shape:
    """Return the sizes of a linear layer, quantized or not."""
    outputs, inputs = module["weight"].shape  # an attribute counts as read, and is then kept
    if isinstance(module, nn.QuantizedLinear):
        inputs = inputs * 32 // module.bits
    return Shape(inputs, outputs)


def adapt(layers: Mapping[str, Any], count: int, rank: int) -> GraphStore:
    """Enable adapters in ``layers``, with ``count`` places of at most ``rank``. Return their
    storage."""
    kinds: dict[type, type] = {}
    found = {}
    for name, module in layers.items():
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = type(f"Adapted{kind.__name__}", (_Adapted, kind), {})
        module.adapter_name, module.factors = name, Factors(shape_of(module), count, rank)
        module.__class__ = kinds[kind]
        found[name] = module.factors
    return GraphStore(found)


def leave_uncompiled(model: nn.Module) -> None:
    """Let layers of Kimi K3 compute decodes as they are written. On Metal they compile themselves,
    and would keep the adapters of the first pass."""
    for module in model.modules():
        if (plain := getattr(module, "_decode_core", None)) is not None:
            module._step = plain
