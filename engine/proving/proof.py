"""The proof that a model may be batched, made before it serves anything.

A model's code may treat keys, masks, state or offsets in a way that slots do not expect. Its
answers would then be wrong without an error. So the loaded model itself is run on a few made-up
sequences of uneven length, through mlx-lm's own caches and through the batched executor. Both
must give the same logits.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout
from engine.executor.batched import BatchedExecutor
from engine.proving.oracle import Reference, make_reference
from engine.proving.trial import BLOCK_SIZE, StepFailed, Trial

RELATIVE_TOLERANCE = {mx.float32: 2e-3, mx.float16: 5e-2, mx.bfloat16: 1e-1}
"""By the type of the logits, as a part of their spread (standard deviation) at a position."""

LONGEST_WINDOW = 40
"""A proof does not go beyond longer windows, since that would take too long."""

STEPS = 2

QUANTIZED_TOLERANCE = {8: 0.5, 4: 3.0}
"""By bits. Rounding in another order changes a code here and there, and codes of one layer change
those of the next. So little is left to compare: that it runs, and that logits are similar.
Everything else was proven without quantization, through the same code."""


class NotBatchable(Exception):
    """Batched logits differ from mlx-lm's, or batching raised. The message says how."""


def proof_references(model: Any, layout: Layout, vocab_size: int) -> list[Reference]:
    """Return the sequences of a proof. The last one has no prefill, and a slot used before."""
    windows = [layer.window for layer in layout.layers if layer.window]
    longest = min(min(windows, default=0), LONGEST_WINDOW) + 9
    return _references(model, layout, vocab_size, longest, 5, 12, 1)


def short_references(model: Any, layout: Layout, vocab_size: int) -> list[Reference]:
    """Return the sequences of a short proof."""
    return _references(model, layout, vocab_size, 9, 5)


def _references(model: Any, layout: Layout, vocab_size: int, *lengths: int) -> list[Reference]:
    return [
        make_reference(model, length, STEPS, vocab_size, seed, 1, layout.precision)
        for seed, length in enumerate(lengths)
    ]


def prove(model: Any, layout: Layout, batch: type[RaggedBatch], given: list[Reference]) -> None:
    """Raise `NotBatchable` unless ``model`` gives the expected logits of ``given`` in a batch."""
    trial = Trial(BatchedExecutor(model, layout, BLOCK_SIZE, batch))
    try:
        trial.run_short(given)
    except StepFailed as error:
        raise NotBatchable(str(error)) from error
    except Exception as error:
        raise NotBatchable(f"{type(error).__name__}: {error}") from error
    tolerance = RELATIVE_TOLERANCE.get(given[0].expected[0].dtype, 1e-1)
    tolerance = QUANTIZED_TOLERANCE.get(layout.kv_bits, tolerance)
    if not trial.max_difference <= tolerance:
        raise NotBatchable(f"logits differ by {trial.max_difference:.3g} of their spread")
