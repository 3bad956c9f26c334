"""Which executor a model gets: the fastest one that is proven right for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from engine.batch import device
from engine.batch.dense import DenseBatch, GroupedDenseBatch, RowBatch
from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout, UnsupportedLayout, probe
from engine.cache.quantization import SMALLEST_GROUP, UNQUANTIZED, Precision
from engine.executor.base import Executor
from engine.executor.batched import BatchedExecutor
from engine.executor.serial import SerialExecutor, measured_token_bytes
from engine.proving.proof import NotBatchable, prove, samples, short_samples

FALLBACKS = (DenseBatch, GroupedDenseBatch, RowBatch)

ONE_ROW = {
    "minimax_m3_vl": "its sparse attention takes all rows to be as long as the longest",
}
"""Model types that are wrong in batches in a way that a few dozen tokens do not show."""


class Choice(NamedTuple):
    """``reason`` says why it is not the fastest way of computing, or why prefixes are not
    reused, ``whole`` where and why keys and values are not quantized although they should be;
    both are empty where that is not so."""

    executor: Executor
    reason: str = ""
    whole: str = ""


def choose(
    model: Any, vocab_size: int, block_size: int, precision: Precision = UNQUANTIZED
) -> Choice:
    """Tries from the fastest way to the slowest; mlx-lm's own caches, one sequence at a
    time, are always right."""
    reasons: list[str] = []
    try:
        layout = probe(model)
        given = samples(model, layout, vocab_size)
        classes: tuple[type[RaggedBatch], ...] = (
            *device.batch_classes(model, layout),
            *FALLBACKS,
        )
        if (known := ONE_ROW.get(getattr(model, "model_type", ""))) is not None:
            reasons.append(known)
            classes = (RowBatch,)
        for batch_class in classes:
            try:
                prove(model, layout, batch_class, given)
            except NotBatchable as reason:
                reasons.append(str(reason))
                continue
            kept, whole = _quantized(model, layout, batch_class, vocab_size, precision)
            executor = BatchedExecutor(model, kept, block_size, batch_class)
            return Choice(executor, "".join(reasons[:1]), whole)
    except UnsupportedLayout as reason:
        reasons.append(str(reason))
    finally:
        mx.clear_cache()
    whole = "" if precision.bits == 16 else "mlx-lm's own caches"
    return Choice(SerialExecutor(model, measured_token_bytes(model)), reasons[0], whole)


def _quantized(
    model: Any,
    layout: Layout,
    batch_class: type[RaggedBatch],
    vocab_size: int,
    precision: Precision,
) -> tuple[Layout, str]:
    """``layout`` with ``precision``, as far as that is right; and where it is not, and why."""
    kept = layout.quantized(precision, unpacked=device.unpacks())
    if kept.kv_bits < 16:
        try:
            prove(model, kept, batch_class, short_samples(model, kept, vocab_size))
        except NotBatchable as reason:
            return layout, f"any layer: {reason}"
    return kept, _whole(kept)


def _whole(layout: Layout) -> str:
    """Which layers are not quantized, and why."""
    if layout.precision.bits == 16 or not layout.whole_layers:
        return ""
    layers = [layout.layers[number] for number in layout.whole_layers]
    dims = {dim for layer in layers for dim in (layer.key_dim, layer.value_dim)}
    odd = sorted(dim for dim in dims if dim and layout.precision.of(dim) is None)
    return (
        f"{len(layers)} of {len(layout.layers)} layers: no group of {SMALLEST_GROUP} elements or "
        f"more divides heads of {' or '.join(map(str, odd))}"
    )
