"""The times of steps, and what is learned from them."""

from __future__ import annotations

from engine.plan import StepResult
from engine.scheduler.chunks import ChunkPolicy
from engine.scheduler.drafting import Drafting
from engine.scheduler.outputs import Counters
from engine.scheduler.plan_builder import InFlightStep


class StepMeter:
    """Counts steps, and tells of their times those who predict such times."""

    def __init__(self, chunk_policy: ChunkPolicy, drafting: Drafting, counters: Counters) -> None:
        self._chunk_policy = chunk_policy
        self._drafting = drafting
        self._counters = counters
        self._unmeasured: dict[int, list[tuple[int, int]]] = {}
        """Chunks (start, tokens) of which the time is to come, by the number of their step."""

    def clear(self) -> None:
        """Forget the chunks of which the time is to come: it never will."""
        self._unmeasured.clear()

    def measure(self, step: InFlightStep, result: StepResult) -> int:
        """Count ``step``. Return how many tokens it computed."""
        rows, chunks = len(step.decodes), [(start, tokens) for _, start, tokens in step.chunks]
        drafted = sum(len(proposal.tokens) for proposal in step.drafts.values())
        observe = self._chunk_policy.observe
        if result.chunks_apart:
            observe(decode_rows=rows, chunks=(), elapsed_s=result.elapsed_s)
            self._unmeasured[step.number] = [] if result.prompt_logprobs else chunks
        elif not result.prompt_logprobs:  # chunks with these take longer than others
            observe(decode_rows=rows, chunks=chunks, elapsed_s=result.elapsed_s)
        if rows:
            is_alone = result.chunks_apart or not chunks
            self._drafting.observe_step(rows, drafted, result.elapsed_s if is_alone else None)
        for number, elapsed_s in result.chunk_times:
            if seen := self._unmeasured.pop(number, []):
                observe(decode_rows=0, chunks=seen, elapsed_s=elapsed_s)
            self._counters.step_seconds += elapsed_s
        prefilled = sum(tokens for _, tokens in chunks)
        self._counters.steps += 1
        self._counters.step_seconds += result.elapsed_s
        self._counters.batch_rows += rows
        self._counters.prefill_tokens += prefilled
        return prefilled + rows + drafted
