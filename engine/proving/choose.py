"""Chooses a model's executor: the fastest one that is proven right for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from engine.batch import device
from engine.batch.dense import DenseBatch, GroupedDenseBatch, RowBatch
from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout, UnsupportedLayout, probe_layout
from engine.cache.quantization import MIN_GROUP_SIZE, UNQUANTIZED, Precision
from engine.executor.base import Executor
from engine.executor.batched import BatchedExecutor
from engine.executor.serial import SerialExecutor, measured_token_bytes
from engine.proving.proof import NotBatchable, proof_references, prove, short_references

FALLBACK_BATCHES = (DenseBatch, GroupedDenseBatch, RowBatch)

ONE_ROW_MODEL_TYPES = {
    "minimax_m3_vl": "its sparse attention takes all rows to be as long as the longest",
}
"""Model types that give wrong logits in batches, and why; a few dozen tokens do not show it."""


class ChosenExecutor(NamedTuple):
    """The executor of a model, and the limits that the choice has."""

    executor: Executor
    reason: str = ""
    """Why a faster way of computing, or the reuse of prefixes, was ruled out; else empty."""
    unquantized: str = ""
    """Where and why keys and values are not quantized although they should be; else empty."""


def choose_executor(
    model: Any,
    vocab_size: int,
    block_size: int,
    precision: Precision = UNQUANTIZED,
    longest_pass: int | None = None,
) -> ChosenExecutor:
    """Try the ways of batching from the fastest to the slowest, and return the first right one.

    With ``longest_pass``, the most tokens of a sequence in one pass, slots keep of layers with a
    window only that, where the way of batching can.
    The last resort is always right: mlx-lm's own caches, one sequence at a time.
    """
    reasons: list[str] = []
    try:
        probed = probe_layout(model)
        given = proof_references(model, probed, vocab_size)
        classes: list[type[RaggedBatch]] = [*device.batch_classes(model, probed), *FALLBACK_BATCHES]
        if (known := ONE_ROW_MODEL_TYPES.get(getattr(model, "model_type", ""))) is not None:
            reasons.append(known)
            classes = [RowBatch]
        for batch_class in classes:
            layout = probed
            if longest_pass is not None and batch_class.has_rings:
                layout = probed.with_rings(longest_pass, block_size)
            try:
                prove(model, layout, batch_class, given)
            except NotBatchable as reason:
                reasons.append(str(reason))
                continue
            kept, unquantized = _quantized(model, layout, batch_class, vocab_size, precision)
            executor = BatchedExecutor(model, kept, block_size, batch_class)
            return ChosenExecutor(executor, "".join(reasons[:1]), unquantized)
    except UnsupportedLayout as reason:
        reasons.append(str(reason))
    finally:
        mx.clear_cache()
    unquantized = "" if precision.bits == 16 else "mlx-lm's own caches"
    serial = SerialExecutor(model, measured_token_bytes(model))
    return ChosenExecutor(serial, reasons[0], unquantized)


def _quantized(
    model: Any, layout: Layout, batch: type[RaggedBatch], vocab_size: int, precision: Precision
) -> tuple[Layout, str]:
    """Return ``layout`` with ``precision`` as far as that is proven, and what stays unquantized."""
    dequantized = device.slots_dequantized(layout)
    quantized = layout.with_precision(precision, dequantized=dequantized)
    if quantized.kv_bits < 16:
        try:
            prove(model, quantized, batch, short_references(model, quantized, vocab_size))
        except NotBatchable as reason:
            return layout, f"any layer: {reason}"
    return quantized, _unquantized(quantized)


def _unquantized(layout: Layout) -> str:
    """Say which layers are not quantized, and why."""
    if layout.precision.bits == 16 or not layout.unquantized_layers:
        return ""
    layers = [layout.layers[number] for number in layout.unquantized_layers]
    dims = {dim for layer in layers for dim in (layer.key_dim, layer.value_dim)}
    odd = sorted(dim for dim in dims if dim and layout.precision.for_dim(dim) is None)
    return (
        f"{len(layers)} of {len(layout.layers)} layers: no group of {MIN_GROUP_SIZE} elements or "
        f"more divides heads of {' or '.join(map(str, odd))}"
    )
