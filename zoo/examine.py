"""Tests one architecture: how it is served, and whether its logits are correct."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
from mlx_lm.generate import generate_step, generation_stream

from engine import device
from engine.cache.quantization import Precision
from engine.executor.base import Executor
from engine.executor.batched import BatchedExecutor
from engine.parallel.group import RankGroup, RankSampler
from engine.plan import Chunk, Decode, Plan
from engine.proving.choose import ChosenExecutor, choose_executor
from engine.proving.oracle import make_reference
from engine.proving.replay import Replay
from engine.proving.trial import GREEDY, PAGE_TOKENS, Trial
from zoo.build import build
from zoo.common import VOCAB_SIZE
from zoo.configs import config

INT8 = Precision(8)

LENGTHS = (49, 3, 17, 1, 38)
STEPS = 5
TOLERANCE = 1e-4
"""As a fraction of the spread of the logits. float32 rounds to about 1e-5 of it in these models."""


class ArchitectureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one architecture."""

    name: str
    loads: bool = False
    batched: bool = False  # whether the decodes of a step are computed in one pass
    batching: str = ""  # how sequences are computed together, in one word
    prefix_cache: bool = False
    reason: str = ""  # why a faster method, or prefix reuse, was ruled out
    difference: float = 0.0
    """The largest distance from mlx-lm's logits, in standard deviations of these."""
    int8: bool = False  # whether all keys and values are kept in 8 bits, and are right
    int8_difference: float = 0.0
    """As ``difference``, in 8 bits; mlx-lm's logits have the same rounding."""
    unquantized: str = ""  # where and why keys and values stay in 16 bits
    error: str = ""  # why it could not be built or run, or the error
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.loads and not self.error


def examine(
    name: str, built: Callable[[str], Any] = build, group: RankGroup | None = None
) -> ArchitectureReport | None:
    """Build and test architecture ``name``; return None if mlx-lm's module has no model.

    All ranks of a ``group`` call this at once. The model is then divided across them, and compared
    with the whole one."""
    started = time.perf_counter()
    device.prepare()
    try:
        model = built(name)
        if model is None:
            return None
        if group is not None and not hasattr(model, "shard"):
            return ArchitectureReport(name=name)
        vocab_size = config(name).get("vocab_size", VOCAB_SIZE)
        references = [
            make_reference(model, n, STEPS, VOCAB_SIZE, seed) for seed, n in enumerate(LENGTHS)
        ]
        if group is not None:
            model.shard(group.mlx)
            mx.eval(model.parameters())
    except (Exception, SystemExit) as raised:
        return ArchitectureReport(name=name, error=_line(raised))
    executor, reason, _ = _chosen(group, model, vocab_size)
    trial = Trial(executor, stretch=1)
    alone = executor.spec.max_sequences == 1
    error = ""
    try:
        trial.run_all(references)
        if not trial.max_difference <= TOLERANCE:
            error = f"{trial.worst_stage}: logits differ by {trial.max_difference:.2g}"
        elif alone and not _same_tokens(model, executor, references[0].prompt):
            error = "other tokens than mlx-lm's"
    except Exception as raised:
        error = _line(raised)
    quantized = examine_quantized(model, vocab_size, group)
    return ArchitectureReport(
        name=name,
        loads=True,
        batched=executor.spec.batches_decodes,
        batching=executor.spec.batching,
        prefix_cache=executor.spec.prefix_cache,
        reason=_one_line(reason),
        difference=trial.max_difference,
        int8=not quantized.error and not quantized.unquantized,
        int8_difference=quantized.difference,
        unquantized=quantized.unquantized,
        error=error or quantized.error,
        seconds=time.perf_counter() - started,
    )


class QuantizedReport(NamedTuple):
    """``difference``, ``unquantized`` and ``error`` of an `ArchitectureReport`, in 8 bits."""

    difference: float = 0.0
    unquantized: str = ""
    error: str = ""


def _chosen(group: RankGroup | None, model: Any, vocab_size: int, **options: Any) -> ChosenExecutor:
    """Return `choose_executor`'s choice, the same on all ranks of ``group``."""
    if group is None:
        return choose_executor(model, vocab_size, PAGE_TOKENS, **options)
    with group.same_logits(model):
        chosen = choose_executor(model, vocab_size, PAGE_TOKENS, **options)
    chosen.executor.use_sampler(RankSampler(group))
    return chosen


def examine_quantized(
    model: Any, vocab_size: int, group: RankGroup | None = None
) -> QuantizedReport:
    """Try ``model`` with keys and values in 8 bits (`engine.proving.replay`)."""
    try:
        executor, _, unquantized = _chosen(group, model, vocab_size, precision=INT8)
        if not isinstance(executor, BatchedExecutor) or executor.spec.kv_bits == 16:
            why = _one_line(unquantized) or "it keeps no keys and values"
            return QuantizedReport(unquantized=why)
        references = [
            make_reference(model, n, STEPS, VOCAB_SIZE, seed, num_ways=0)
            for seed, n in enumerate(LENGTHS)
        ]
        trial = Trial(executor, Replay(model, executor), stretch=1)
        trial.run_all(references)
    except Exception as raised:
        return QuantizedReport(error=f"INT8: {_line(raised)}")
    error = ""
    if not trial.max_difference <= TOLERANCE:
        error = f"INT8: {trial.worst_stage}: logits differ by {trial.max_difference:.2g}"
    return QuantizedReport(trial.max_difference, _one_line(unquantized), error)


def _line(error: BaseException) -> str:
    return _one_line(f"{type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    """Return the first line; MLX's type errors have several."""
    return text.strip().partition("\n")[0]


def _same_tokens(model: Any, executor: Executor, prompt: Sequence[int], count: int = 8) -> bool:
    """Return whether ``executor`` alone continues ``prompt`` as mlx-lm's generation does."""
    theirs = generate_step(mx.array(prompt), model, max_tokens=count)
    expected = [int(token) for token, _ in theirs]
    mx.synchronize(generation_stream)  # a step ahead, whose sums over ranks would meet ours
    slot, chunk = 0, Chunk(0, 0, tuple(prompt[:-1]))
    executor.dispatch(Plan(step=1, chunks=(chunk,))).read()
    tokens: list[int] = []
    for index in range(count):
        token = tokens[-1] if tokens else prompt[-1]
        decode = Decode(slot, len(prompt) - 1 + index, token, index, GREEDY)
        tokens += executor.dispatch(Plan(step=2 + index, decodes=(decode,))).read().tokens
    return tokens == expected
