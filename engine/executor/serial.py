"""The executor for models that slots cannot hold: one sequence, mlx-lm's own caches."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from engine.executor.base import Executor, PendingStep
from engine.plan import Chunk, Decode, Plan, Scored, Slot, StepResult
from engine.sampling.logprobs import score_followers
from engine.sampling.masks import Masking
from engine.sampling.sampler import Sampler
from shared.wire import TokenLogprobs

PREFILL_STEP_TOKENS = 2048
"""mlx-lm's own: prompts are computed in pieces of this size."""
SCORED_AT_ONCE = 128
"""Positions; their logits are large."""


class SerialExecutor(Executor):
    """Right for whatever mlx-lm runs, at batch size 1 and without prefix reuse.

    A prompt is computed in the very pieces in which mlx-lm's generation would, not in
    the plan's chunks, since there are models whose answer depends on them: chunks wait
    until a piece is full, or until the first decode. Plans come with at most one slot
    in use, and every input token given.
    """

    look_ahead = False
    prefix_cache = False
    keeps_kv = True
    max_sequences = 1
    batches = False
    row_bytes = 0
    kv_bits = 16
    how = "one at a time"

    def __init__(self, model: Any, token_bytes: int) -> None:
        self._model = model
        self.block_token_bytes = self.slot_token_bytes = token_bytes
        self._sampler = Sampler()
        self.reset()

    def reset(self) -> None:
        self._running: dict[Slot, _Running] = {}
        self._sampler.reset()
        mx.clear_cache()

    def use_grammars(self, masking: Masking) -> None:
        self._sampler.masking = masking

    def dispatch(self, plan: Plan) -> PendingStep:
        started = time.perf_counter()
        for number in plan.freed_slabs:
            self._running = {s: one for s, one in self._running.items() if s.slab != number}
        self._sampler.forget(plan.freed_slabs)
        for move in plan.moves:
            self._running[move.target] = self._running.pop(move.source)
            self._sampler.move(move.source, move.target)
        failed: list[tuple[Slot, str]] = []
        scored: list[Scored] = []
        decoded = [self._decode(decode, failed, scored) for decode in plan.decodes]
        for chunk in plan.chunks:
            try:
                found = self._sequence(chunk.slot, chunk.start).prefill(chunk)
                scored += [Scored(chunk.slot, *each) for each in found]
            except Exception as error:
                failed.append((chunk.slot, f"{type(error).__name__}: {error}"))
        return _Done(
            StepResult(
                step=plan.step,
                tokens=tuple(token for token, _ in decoded),
                logprobs=tuple(logprobs for _, logprobs in decoded),
                scored=tuple(scored),
                failed=tuple(failed),
                elapsed_s=time.perf_counter() - started,
            )
        )

    def _sequence(self, slot: Slot, start: int) -> _Running:
        """What runs in ``slot``; one that starts at position 0 takes its place."""
        if start == 0:
            self._running = {slot: _Running(self._model)}
        return self._running[slot]

    def _decode(
        self, decode: Decode, failed: list[tuple[Slot, str]], scored: list[Scored]
    ) -> tuple[int, TokenLogprobs | None]:
        """The next token; a number without meaning where the prompt ``failed`` only now."""
        assert decode.token is not None
        running = self._sequence(decode.slot, decode.position)
        try:
            scored += [Scored(decode.slot, *found) for found in running.finish_prompt()]
        except Exception as error:
            failed.append((decode.slot, f"{type(error).__name__}: {error}"))
            return 0, None
        masks = self._sampler.start_masks([decode], [decode.token])
        logits = running.compute([decode.token])[:, -1]
        if self.observer is not None:
            self.observer([decode], logits)
        inputs = mx.array([decode.token], mx.int32)
        sampled = self._sampler.sample(logits, [decode], inputs, masks)
        failed += [(decode.slot, why) for _, why in sampled.failed]
        token: int = sampled.tokens.item()
        return token, sampled.scores.read()[0] if sampled.scores else None


_Found = tuple[int, tuple[TokenLogprobs, ...]]
"""A position and log-probabilities from there on, as in `Scored`."""


class _Running:
    """The one running sequence: its caches, and the prompt's tokens that wait.

    ``_followers`` are those of the waiting tokens whose followers are to be scored.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = make_prompt_cache(model)
        self._computed = 0
        self._waiting: list[int] = []
        self._followers: list[int] = []
        self._alternatives = 0

    def prefill(self, chunk: Chunk) -> list[_Found]:
        self._waiting += chunk.token_ids
        self._followers += chunk.followers
        self._alternatives = chunk.logprobs
        found: list[_Found] = []
        while len(self._waiting) >= PREFILL_STEP_TOKENS:
            found += self._fill(PREFILL_STEP_TOKENS)
        return found

    def finish_prompt(self) -> list[_Found]:
        return self._fill(len(self._waiting)) if self._waiting else []

    def compute(self, token_ids: list[int]) -> mx.array:
        """The logits (1, tokens, vocab)."""
        logits: mx.array = self._model(mx.array([token_ids]), cache=self._cache)
        return logits

    def _fill(self, count: int) -> list[_Found]:
        """Computes the first ``count`` of the tokens that wait."""
        tokens, followers = self._waiting[:count], self._followers[:count]
        del self._waiting[:count], self._followers[:count]
        start = self._computed
        self._computed += count
        logits = self.compute(tokens)[0]
        found: list[_Found] = []
        for first in range(0, len(followers), SCORED_AT_ONCE):
            some = followers[first : first + SCORED_AT_ONCE]
            part = logits[first : first + len(some)]
            found.append((start + first, score_followers(part, some, self._alternatives).read()))
        mx.eval([cache.state for cache in self._cache])
        return found


class _Done(PendingStep):
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def read(self) -> StepResult:
        return self._result


def measured_token_bytes(model: Any) -> int:
    """Bytes that mlx-lm's caches of ``model`` grow by for each token, at least 1.

    Measured between two lengths, since caches grow in steps and some do not grow."""
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
