"""Chooses a model's executor: the fastest one that is proven correct for it."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import mlx.core as mx

from engine import device
from engine.batch.dense import DenseBatch, GroupedDenseBatch, RowBatch
from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout, UnsupportedLayout, probe_layout
from engine.cache.quantization import MIN_GROUP_SIZE, UNQUANTIZED, Precision
from engine.executor.base import Executor
from engine.executor.batched import BatchedExecutor
from engine.executor.serial import SerialExecutor, measured_token_bytes
from engine.proving.proof import (
    NotBatchable,
    proof_references,
    prove,
    rounding_of_activations,
    short_references,
)
from engine.proving.remembered import ProvenBatches, Record

logger = logging.getLogger(__name__)

FALLBACK_BATCHES = (DenseBatch, GroupedDenseBatch, RowBatch)

ONE_ROW_MODEL_TYPES = {
    "minimax_m3_vl": "its sparse attention assumes that all rows are as long as the longest",
}
"""Model types with wrong logits in batches, and the reason; a few dozen tokens do not reveal it."""


class ChosenExecutor(NamedTuple):
    """The executor of a model, and its limitations."""

    executor: Executor
    reason: str = ""
    """Why a faster method, or prefix reuse, was ruled out; else empty."""
    unquantized: str = ""
    """Which keys and values are not quantized despite the setting, and why; else empty."""


def choose_executor(
    model: Any,
    vocab_size: int,
    page_tokens: int,
    precision: Precision = UNQUANTIZED,
    record: Record | None = None,
) -> ChosenExecutor:
    """Try the kinds of batching from fastest to slowest, and return the first correct one.

    The last resort is always correct: mlx-lm's own caches, one sequence at a time. What ``record``
    remembers is not proven again; a successful proof is added to it.
    """
    if record is not None and (found := _remembered(model, page_tokens, record)) is not None:
        return found
    logger.info("checking that batches give mlx-lm's answers; this takes longer than loading")
    began = time.monotonic()
    found, is_lasting = _proven(model, vocab_size, page_tokens, precision)
    if record is not None and is_lasting and isinstance(found.executor, BatchedExecutor):
        executor = found.executor
        record.write(ProvenBatches.of(executor.batch_class, executor.layout, *found[1:]))
    logger.info("the check took %.1f s", time.monotonic() - began)
    return found


def _proven(
    model: Any, vocab_size: int, page_tokens: int, precision: Precision
) -> tuple[ChosenExecutor, bool]:
    """Return the first that is correct, and whether the next start would choose the same."""
    if device.rounds_activations(model):
        return _proven_with_8_bits(model, vocab_size, page_tokens, precision)
    reasons: list[str] = []
    is_lasting = True
    try:
        probed = probe_layout(model)
        given = proof_references(model, probed, vocab_size)
        own = device.batch_classes(model, probed, precision, page_tokens)
        classes: list[type[RaggedBatch]] = [*own, *FALLBACK_BATCHES]
        if (known := ONE_ROW_MODEL_TYPES.get(getattr(model, "model_type", ""))) is not None:
            reasons.append(known)
            classes = [RowBatch]
        for batch_class in classes:
            try:
                prove(model, probed, batch_class, given)
            except NotBatchable as reason:
                reasons.append(str(reason))
                is_lasting &= reason.is_lasting
                continue
            kept, unquantized, lasts = _quantized(model, probed, batch_class, vocab_size, precision)
            executor = BatchedExecutor(model, kept, page_tokens, batch_class)
            chosen = ChosenExecutor(executor, "".join(reasons[:1]), unquantized)
            return chosen, is_lasting and lasts
    except UnsupportedLayout as reason:
        reasons.append(str(reason))
    finally:
        mx.clear_cache()
    return _one_at_a_time(model, precision, reasons[0]), is_lasting


def _proven_with_8_bits(
    model: Any, vocab_size: int, page_tokens: int, precision: Precision
) -> tuple[ChosenExecutor, bool]:
    """Choose with activations in fp32 and the same codes, where the proof can be strict. Then show
    that activations in 8 bits differ only by their rounding."""
    with device.exact_products(model):
        found, is_lasting = _proven(model, vocab_size, page_tokens, precision)
        if isinstance(executor := found.executor, BatchedExecutor):
            layout = executor.layout.with_precision(UNQUANTIZED)
            exact = proof_references(model, layout, vocab_size)
    if not isinstance(executor, BatchedExecutor):
        return found, is_lasting
    given = proof_references(model, layout, vocab_size)
    batch_class = _named(model, layout, page_tokens, executor.batch_class.__name__)
    try:
        if batch_class is None:
            raise NotBatchable("with activations in 8 bits it is computed differently")
        prove(model, layout, batch_class, given, rounding_of_activations(given, exact))
    except NotBatchable as reason:
        return _one_at_a_time(model, precision, str(reason)), is_lasting
    executor = BatchedExecutor(model, executor.layout, page_tokens, batch_class)
    return found._replace(executor=executor), is_lasting


def _one_at_a_time(model: Any, precision: Precision, reason: str) -> ChosenExecutor:
    unquantized = "" if precision.bits == 16 else "mlx-lm's own caches"
    return ChosenExecutor(SerialExecutor(model, measured_token_bytes(model)), reason, unquantized)


def _remembered(model: Any, page_tokens: int, record: Record) -> ChosenExecutor | None:
    """Return the executor that ``record`` names; None if the model now has another one."""
    if (proven := record.read()) is None:
        return None
    layout = proven.layout
    batch_class = _named(model, layout, page_tokens, proven.batch)
    # Layers outside MLX record here which of their weights the model's code also reads.
    if batch_class is None or (batch_class.runs_model and not layout.is_of(probe_layout(model))):
        return None
    logger.info("%s was proven correct at an earlier start", proven.batch)
    executor = BatchedExecutor(model, layout, page_tokens, batch_class)
    return ChosenExecutor(executor, proven.reason, proven.unquantized)


def _named(model: Any, layout: Layout, page_tokens: int, name: str) -> type[RaggedBatch] | None:
    """Return the class of batches of that name, if ``model`` has it."""
    own = device.batch_classes(model, layout, layout.precision, page_tokens)
    classes: list[type[RaggedBatch]] = [*own, *FALLBACK_BATCHES]
    return next((each for each in classes if each.__name__ == name), None)


def _quantized(
    model: Any, layout: Layout, batch: type[RaggedBatch], vocab_size: int, precision: Precision
) -> tuple[Layout, str, bool]:
    """Return ``layout`` with ``precision`` as far as proven, what stays unquantized, and whether it
    would at the next start."""
    quantized = layout.with_precision(precision)
    if quantized.kv_bits < 16:
        try:
            prove(model, quantized, batch, short_references(model, quantized, vocab_size))
        except NotBatchable as reason:
            return layout, f"any layer: {reason}", reason.is_lasting
    return quantized, _unquantized(quantized), True


def _unquantized(layout: Layout) -> str:
    """Return which layers are not quantized, and why."""
    if layout.precision.bits == 16 or not layout.unquantized_layers:
        return ""
    layers = [layout.layers[number] for number in layout.unquantized_layers]
    dims = {dim for layer in layers for dim in (layer.key_dim, layer.value_dim)}
    odd = sorted(dim for dim in dims if dim and layout.precision.for_dim(dim) is None)
    return (
        f"{len(layers)} of {len(layout.layers)} layers: no group of {MIN_GROUP_SIZE} elements or "
        f"more divides heads of {' or '.join(map(str, odd))}"
    )
