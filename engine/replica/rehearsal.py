"""Steps with and without drafts, run at startup to measure their costs.

On a device that works while the next step is built, a step with drafts waits for the previous one.
Without this, the first requests would have to find out what that costs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.executor.base import Executor
from engine.executor.runner import StepRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.speculation.batch_costs import BatchCosts
from engine.speculation.options import SpeculationOptions
from engine.speculation.source import DraftSource, Proposal
from engine.speculation.speculator import MAX_DRAFT_TOKENS, Speculator
from shared.wire import SamplingParams, Submit

logger = logging.getLogger(__name__)

LENGTHS = (0, 2, 4, 8, MAX_DRAFT_TOKENS)
"""Numbers of drafts in the steps. Each is used for some tokens in turn. No sequence waits for one
draft alone."""
STEPS_EACH = 4
PROMPT_TOKENS = 32
WARM_UP_S, LONGEST_S = 4.0, 2.0
"""Time limits of the steps that compile kernels, and of those that are measured: a larger model
learns the rest from its first requests."""


class _Varied(DraftSource):
    """Proposes varying numbers of tokens, which are hardly ever right."""

    def __init__(self, steps_each: int) -> None:
        self._steps_each = steps_each
        self._known = self._steps = 0

    @property
    def is_done(self) -> bool:
        """Whether there were steps with all numbers of drafts."""
        return self._steps > len(LENGTHS) * self._steps_each

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        self._steps += len(tokens) > self._known  # may be called twice for one step
        self._known = len(tokens)
        length = min(count, LENGTHS[self._steps // self._steps_each % len(LENGTHS)])
        return Proposal((0,) * length, "rehearsal") if length else None


def rehearse(executor: Executor, config: SchedulerConfig, costs: BatchCosts) -> None:
    """Run steps of one sequence, first one of each kind, then those that ``costs`` learns from.

    The executor is reset afterwards. An error only loses what would have been learned."""
    began = time.monotonic()
    try:
        if _run(executor, config, BatchCosts(), 1, WARM_UP_S):
            _run(executor, config, costs, STEPS_EACH, LONGEST_S)
    except Exception as error:
        logger.warning("cannot measure the costs of drafts: %s: %s", type(error).__name__, error)
    executor.reset()
    logger.info("measured the costs of drafts in %.2f s", time.monotonic() - began)


def _run(
    executor: Executor,
    config: SchedulerConfig,
    costs: BatchCosts,
    steps_each: int,
    longest_s: float,
) -> bool:
    """Return whether there was time for all numbers of drafts."""
    until = time.monotonic() + longest_s
    executor.reset()
    options = SpeculationOptions(tokens=MAX_DRAFT_TOKENS, adapts=False)
    source = _Varied(steps_each)
    speculator = Speculator(options, [lambda request, grammar: source], costs=costs)
    scheduler = Scheduler(replace(config, store_enabled=False), speculator=speculator)
    request = Submit(
        request_id="rehearsal",
        attempt=0,
        token_ids=[1] * min(PROMPT_TOKENS, config.context_length // 4),
        max_tokens=min(
            (MAX_DRAFT_TOKENS + 1) * len(LENGTHS) * STEPS_EACH, config.context_length // 4
        ),
        sampling=SamplingParams(seed=0),
        stop_token_ids=[],
    )
    scheduler.submit(request)
    steps = StepRunner(executor)
    while not scheduler.idle:
        if source.is_done or time.monotonic() > until:
            scheduler.abort(request.request_id)
        for result in steps.results(scheduler.schedule()):
            scheduler.apply(result)
        scheduler.take_outputs()
    return source.is_done
