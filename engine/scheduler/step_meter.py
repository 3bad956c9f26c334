"""Timing of steps, and learning from it."""

from __future__ import annotations

from engine.plan import StepResult
from engine.scheduler.outputs import Counters
from engine.scheduler.planning.drafting import Drafting
from engine.scheduler.planning.pictures import PictureTable
from engine.scheduler.planning.plan_builder import InFlightStep, PlannedEncoding, PlannedStretch
from engine.scheduler.timing.chunks import ChunkPolicy
from engine.scheduler.timing.time_share import TimeShare

MAX_FIRST_SHARE = 0.5
"""The first stretch of a pass says nothing about the next ones if it has at most this share of the
layers. It is the first to use memory of that size, which takes several times as long in a new
process, and it prepares inputs for all layers."""


class StepMeter:
    """Counts steps, and passes their times to the components that predict times."""

    def __init__(
        self,
        chunk_policy: ChunkPolicy,
        time_share: TimeShare,
        pictures: PictureTable,
        drafting: Drafting,
        counters: Counters,
    ) -> None:
        self._chunk_policy = chunk_policy
        self._time_share = time_share
        self._pictures = pictures
        self._drafting = drafting
        self._counters = counters
        self._unmeasured: dict[int, tuple[PlannedStretch | PlannedEncoding, bool]] = {}
        """Prompt computations whose time is not known yet, by step number, and whether it will say
        something about the next ones."""

    def clear(self) -> None:
        """Forget the chunks whose time is not known yet, because it never will be."""
        self._unmeasured.clear()
        self._time_share.forget_planned()

    def measure(self, step: InFlightStep, result: StepResult) -> int:
        """Count ``step``. Return how many tokens it computed."""
        rows, stretch, of_prompts = len(step.decodes), step.stretch, step.stretch or step.encoding
        if step.encoding is not None and result.failed_pictures:  # its time has no information
            of_prompts = step.encoding._replace(size_bytes=0.0, is_last=False)
        drafted = sum(len(proposal.tokens) for proposal in step.drafts.values())
        is_apart = (result.chunks_apart or of_prompts is None) and not step.ends
        is_typical = not step.fills_memory
        if step.ends:
            self._measure_ends(step, result.elapsed_s)
        elif is_apart and rows:
            if is_typical:
                self._chunk_policy.observe_decodes(result.elapsed_s)
            self._time_share.decoded(result.elapsed_s)
        if of_prompts is not None and not result.chunks_apart:
            self._measure_prompts(of_prompts, result.elapsed_s, rows, learns=is_typical)
        elif of_prompts is not None:
            self._unmeasured[step.number] = of_prompts, is_typical
        if rows:
            # Beside chunks it may be the time to build these.
            is_known = is_apart and is_typical and of_prompts is None
            elapsed_s = result.elapsed_s if is_known else None
            self._drafting.observe_step(step, drafted, elapsed_s)
        for number, elapsed_s in result.chunk_times:
            if seen := self._unmeasured.pop(number, None):
                self._measure_prompts(seen[0], elapsed_s, 0, learns=seen[1])
            self._counters.step_seconds += elapsed_s
        self._counters.steps += 1
        self._counters.step_seconds += result.elapsed_s
        self._counters.batch_rows += rows
        of_ends = sum(chunk.tokens for chunk in step.ends)
        self._counters.prefill_tokens += of_ends + sum(chunk.tokens for chunk in step.completed)
        if stretch is None:
            return rows + drafted + of_ends + (step.encoding is not None)
        self._counters.prefill_stretches += 1
        self._counters.prefill_passes += bool(step.completed)
        return rows + drafted + max(1, int(stretch.share * sum(n for _, n in stretch.sizes)))

    def _measure_ends(self, step: InFlightStep, elapsed_s: float) -> None:
        """Divide the time of a decode between its rows and the ends of prompts: these take what the
        shortest decode without them does not. Predictions are from long chunks, whose tokens take
        less."""
        if step.ends_charged_s is not None:
            of_rows_s = min(self._chunk_policy.pass_s, elapsed_s)
            self._time_share.decoded(of_rows_s)
            self._time_share.computed(elapsed_s - of_rows_s, step.ends_charged_s)

    def _measure_prompts(
        self,
        stretch: PlannedStretch | PlannedEncoding,
        elapsed_s: float,
        rows: int,
        *,
        learns: bool = True,
    ) -> None:
        """Count the time of a stretch, computed with ``rows`` decodes in the same time, and learn
        from it."""
        if stretch.charged_s is not None:
            self._time_share.computed(elapsed_s, stretch.charged_s)
        if isinstance(stretch, PlannedEncoding):
            if stretch.size_bytes:
                self._pictures.observe(stretch.size_bytes, elapsed_s)
            self._counters.encode_seconds += elapsed_s
            self._counters.encoded_images += stretch.is_last
            return
        is_cold = stretch.begins and stretch.share <= MAX_FIRST_SHARE
        if learns and stretch.share and not stretch.scored and not is_cold:
            self._chunk_policy.observe_chunks(
                stretch.sizes, elapsed_s, share=stretch.share, beside_decodes=rows > 0
            )
