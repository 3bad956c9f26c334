"""The proof that a model may be batched, before it serves anything.

A model's code may use keys, masks, state or offsets in a way that pages do not expect. Its answers
would then be wrong without an error. The loaded model itself is therefore run on a few random
sequences of different lengths, through mlx-lm's own caches and through the batched executor. Both
must give the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from engine.backend.device_errors import is_device_failure
from engine.batch.ragged import RaggedBatch
from engine.cache.layout import Layout
from engine.executor.base import is_allocation_failure
from engine.executor.batched import BatchedExecutor
from engine.proving.oracle import Reference, make_reference, rounding_noise
from engine.proving.trial import PAGE_TOKENS, StepFailed, Trial

TOLERANCE = 2e-3
"""Always allowed. Like all tolerances here, a fraction of the spread (standard deviation) of the
logits at a position. In fp32 nothing more is allowed."""

NOISE_MULTIPLE = 4.0
"""How much farther a batch may be from mlx-lm in 16 bits than mlx-lm's own two ways of computing
are from each other. A fixed tolerance was tried: a tenth of the spread. Two or three steps of
bfloat16 exceed that in models with logits above 16, and a smaller one would be needed to reject
wrong rows in float16. One step at the largest logit always counts as noise, because both ways may
happen to use the same kernels."""

MAX_NOISE = {mx.float16: 0.5, mx.bfloat16: 1.0}
"""Max noise ever allowed: wrong rows differ by 1 to 6 in most models. If mlx-lm's two ways differ
by more, that is not rounding."""

LONGEST_WINDOW = 40
"""A proof does not exceed longer windows, because that would take too long."""

STEPS = 2

STRETCHES = 3
"""Number of parts in which chunks are computed, with decodes in between."""

QUANTIZED_TOLERANCE = {8: 0.5, 4: 3.0}
"""By bits. Rounding in another order changes some codes, and codes of one layer change those of the
next. Little is left to compare: that it runs, and that logits are similar. Everything else is
proven without quantization, through the same code."""

ROUNDINGS, MAX_ROUNDING = 2.0, 1.0
"""How much farther two ways of computing with activations in 8 bits may be from each other than one
of them is from activations in fp32. A different last bit changes some codes, and these the
following codes; in the end, both sets of codes are as different as if rounded independently. Each
is then one rounding away from fp32, and two from the other. Never more than the second is allowed.
"""


class NotBatchable(Exception):
    """Batched logits differ from mlx-lm's, or batching raised. The message gives the details."""

    def __init__(self, message: str, *, is_lasting: bool = True) -> None:
        """``is_lasting``: whether it would be the same at the next start. Memory may have been
        short because of another program."""
        super().__init__(message)
        self.is_lasting = is_lasting


def proof_references(model: Any, layout: Layout, vocab_size: int) -> list[Reference]:
    """Return the sequences of a proof. The last one has no prefill, and reuses a slot."""
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


def rounding_of_activations(given: Sequence[Reference], exact: Sequence[Reference]) -> float:
    """Return the allowed difference of two ways of computing ``given`` with activations in 8 bits.
    ``exact`` are the same sequences with activations in fp32."""
    found = [
        whole.difference(step, logits)
        for one, whole in zip(given, exact, strict=True)
        for step, logits in enumerate(one.expected[0])
    ]
    return min(ROUNDINGS * max(found), MAX_ROUNDING)


def prove(
    model: Any,
    layout: Layout,
    batch: type[RaggedBatch],
    given: list[Reference],
    rounding: float = 0.0,
) -> None:
    """Raise `NotBatchable` unless ``model`` gives the expected logits of ``given`` in a batch.

    A difference of up to ``rounding`` is also allowed. Errors of a GPU are raised as they are: they
    say nothing about batches."""
    executor = BatchedExecutor(model, layout, PAGE_TOKENS, batch)
    trial = Trial(executor, stretch=-(-executor.spec.layers // STRETCHES))
    try:
        trial.run_short(given)
    except StepFailed as error:
        raise NotBatchable(str(error)) from error
    except Exception as error:
        if is_device_failure(error):
            raise
        reason, is_lasting = f"{type(error).__name__}: {error}", not is_allocation_failure(error)
        raise NotBatchable(reason, is_lasting=is_lasting) from error
    finally:
        executor.reset()  # what is in flight belongs to no later trial
    difference = trial.max_difference
    if not (difference <= rounding or _is_rounding(difference, model, layout, given)):
        raise NotBatchable(f"logits differ by {difference:.3g} of their spread")


def _is_rounding(difference: float, model: Any, layout: Layout, given: Sequence[Reference]) -> bool:
    """Return whether rounding explains a ``difference`` from the logits of ``given``.

    mlx-lm's other way of computing runs only if nothing simpler decides."""
    if difference <= QUANTIZED_TOLERANCE.get(layout.kv_bits, TOLERANCE):
        return True
    # Some models cast their last logits to fp32.
    dtypes = {given[0].expected[0].dtype, *(layer.dtype for layer in layout.layers)}
    coarsest = max(dtypes, key=lambda dtype: mx.finfo(dtype).eps)
    if not difference <= MAX_NOISE.get(coarsest, 0.0):
        return False
    step = max(one.largest_step(coarsest) for one in given)
    if difference <= NOISE_MULTIPLE * step:
        return True
    return difference <= NOISE_MULTIPLE * rounding_noise(model, given, layout.precision)
