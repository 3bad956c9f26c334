"""The executor for models whose caches do not fit into pages: one sequence in mlx-lm's own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.adapters.layers import applied
from engine.backend.device_errors import compute, is_device_failure, raise_late_errors
from engine.executor.base import Executor, ExecutorSpec, PendingStep, is_allocation_failure
from engine.plan import Chunk, Decode, Plan, PromptLogprobs, Slot, StepResult
from engine.sampling.logprobs import target_logprobs
from engine.sampling.sampler import Sampler
from shared.wire import PackedLogprobs, TokenLogprobs

PREFILL_STEP_TOKENS = 2048
"""mlx-lm's default. Prompts are computed in pieces of this size."""
LOGPROBS_AT_ONCE = 128
"""Positions scored in one call, limited because their logits are large."""


class SerialExecutor(Executor):
    """Runs every model that mlx-lm runs, at batch size 1 and without prefix reuse.

    A prompt is computed in the pieces that mlx-lm's generation would use, not in the plan's chunks,
    because the answers of some models depend on them. Chunks therefore wait until a piece is full,
    or until the first decode. A plan uses at most one slot, and gives every input token."""

    def __init__(self, model: Any, token_bytes: int) -> None:
        self._model = model
        self.spec = ExecutorSpec(
            batching="one at a time",
            look_ahead=False,
            batches_decodes=False,
            batches_chunks=False,
            max_sequences=1,
            prefix_cache=False,
            keeps_kv=True,
            kv_bits=16,
            token_bytes=token_bytes,
            state_bytes=0,
        )
        self._sampler = Sampler()
        self.reset()

    def reset(self) -> None:
        self._running: dict[Slot, _SerialSequence] = {}
        self._sampler.reset()
        mx.clear_cache()

    def dispatch(self, plan: Plan) -> PendingStep:
        started = time.perf_counter()
        for slot in plan.freed_slots:
            self._running.pop(slot, None)
        self._sampler.free_slots(plan.freed_slots)
        failed: list[tuple[Slot, str]] = []
        prompt_logprobs: list[PromptLogprobs] = []
        decoded = [self._decode(decode, failed, prompt_logprobs) for decode in plan.decodes]
        for chunk in plan.chunks:
            try:
                found = self._sequence(chunk.slot, chunk.start, chunk.adapter).prefill(chunk)
                prompt_logprobs += [PromptLogprobs(chunk.slot, *each) for each in found]
            except Exception as error:
                if _is_of_device(error):
                    raise
                failed.append((chunk.slot, f"{type(error).__name__}: {error}"))
        return _FinishedStep(
            StepResult(
                step=plan.step,
                tokens=tuple(token for token, _ in decoded),
                logprobs=tuple(logprobs for _, logprobs in decoded),
                prompt_logprobs=tuple(prompt_logprobs),
                failed=tuple(failed),
                elapsed_s=time.perf_counter() - started,
            )
        )

    def _sequence(self, slot: Slot, start: int, adapter: int) -> _SerialSequence:
        """Return the sequence in ``slot``. Position 0 starts a new sequence there."""
        if start == 0:
            self._running = {slot: _SerialSequence(self._model, adapter)}
        return self._running[slot]

    def _decode(
        self, decode: Decode, failed: list[tuple[Slot, str]], prompt_logprobs: list[PromptLogprobs]
    ) -> tuple[int, TokenLogprobs | None]:
        """Return the next token, or a meaningless one if the end of the prompt ``failed``."""
        assert decode.token_id is not None
        running = self._sequence(decode.slot, decode.position, decode.adapter)
        try:
            found = running.finish_prompt()
            prompt_logprobs += [PromptLogprobs(decode.slot, *each) for each in found]
        except Exception as error:
            if _is_of_device(error):
                raise
            failed.append((decode.slot, f"{type(error).__name__}: {error}"))
            return 0, None
        masks = self._sampler.start_masks([decode], [decode.token_id])
        logits = running.compute([decode.token_id])[:, -1]
        if self.logits_observer is not None:
            self.logits_observer([decode], logits)
        inputs = mx.array([decode.token_id], mx.int32)
        sampled = self._sampler.sample(logits, [decode], inputs, masks)
        failed += [(decode.slot, why) for _, why in sampled.failed]
        token: int = sampled.tokens.item()
        logprobs = sampled.logprobs[0].read()[0] if sampled.logprobs else None
        raise_late_errors()  # last: what is read before may be wrong if it raises
        return token, logprobs


_FoundLogprobs = tuple[int, PackedLogprobs]
"""A position, and log-probabilities from there on as in `PromptLogprobs`."""


class _SerialSequence:
    """The running sequence: its caches, and the prompt tokens not computed yet."""

    def __init__(self, model: Any, adapter: int) -> None:
        self._model, self._adapter = model, adapter
        self._cache = make_prompt_cache(model)
        self._num_computed_tokens = 0
        self._pending_ids: list[int] = []
        # The tokens to score, which follow the first of the pending ones.
        self._target_ids: list[int] = []
        self._alternatives = 0

    def prefill(self, chunk: Chunk) -> list[_FoundLogprobs]:
        self._pending_ids += chunk.token_ids
        self._target_ids += chunk.target_ids
        self._alternatives = chunk.logprobs
        found: list[_FoundLogprobs] = []
        while len(self._pending_ids) >= PREFILL_STEP_TOKENS:
            found += self._compute_prompt(PREFILL_STEP_TOKENS)
        return found

    def finish_prompt(self) -> list[_FoundLogprobs]:
        return self._compute_prompt(len(self._pending_ids)) if self._pending_ids else []

    def compute(self, token_ids: list[int]) -> mx.array:
        """Return the logits (1, tokens, vocab)."""
        with applied([self._adapter]):
            logits: mx.array = self._model(mx.array([token_ids]), cache=self._cache)
        return logits

    def _compute_prompt(self, count: int) -> list[_FoundLogprobs]:
        """Compute the first ``count`` pending tokens."""
        tokens, target_ids = self._pending_ids[:count], self._target_ids[:count]
        del self._pending_ids[:count], self._target_ids[:count]
        start = self._num_computed_tokens
        self._num_computed_tokens += count
        logits = self.compute(tokens)[0]
        found: list[_FoundLogprobs] = []
        for first in range(0, len(target_ids), LOGPROBS_AT_ONCE):
            some = target_ids[first : first + LOGPROBS_AT_ONCE]
            part = logits[first : first + len(some)]
            found.append((start + first, target_logprobs(part, some, self._alternatives).pack()))
        compute([cache.state for cache in self._cache])
        return found


def _is_of_device(error: Exception) -> bool:
    """Return whether all that is computed is lost, and may be tried again."""
    return is_allocation_failure(error) or is_device_failure(error)


@dataclass(frozen=True)
class _FinishedStep(PendingStep):
    result: StepResult

    def read(self, *, early: bool = False) -> StepResult:
        return self.result


def measured_token_bytes(model: Any) -> int:
    """Return by how many bytes mlx-lm's caches of ``model`` grow per token, at least 1.

    Measured between two lengths, because caches grow in steps and some do not grow.
    """
    caches = make_prompt_cache(model)
    sizes = []
    for _ in range(2):
        mx.eval(model(mx.zeros((1, 256), mx.int32), cache=caches))
        sizes.append(sum(_nbytes(cache) for cache in caches))
    return max(1, (sizes[1] - sizes[0]) // 256)


def _nbytes(cache: Any) -> int:
    try:
        return int(cache.nbytes)
    except NotImplementedError:
        return 0
