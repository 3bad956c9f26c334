"""Steps with and without drafts, run at startup to measure their costs.

On a device that works while the next step is built, a step with drafts waits for the previous one.
Without this, the first requests would have to find out what that costs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from engine.executor.base import Executor, PendingStep
from engine.scheduler import Scheduler, SchedulerConfig
from engine.speculation.batch_costs import BatchCosts
from engine.speculation.options import SpeculationOptions
from engine.speculation.source import DraftSource, Proposal
from engine.speculation.speculator import MAX_DRAFT_TOKENS, Speculator
from shared.wire import SamplingParams, Submit

logger = logging.getLogger(__name__)

LENGTHS = (0, 1, 2, 4, 8, MAX_DRAFT_TOKENS)
"""Numbers of drafts in the steps. Each is used for some tokens in turn."""
STEPS_EACH = 4
PROMPT_TOKENS = 32
LONGEST_S = 1.0
"""Time limit of the rehearsal: a large model learns from its first requests instead."""


class _Varied(DraftSource):
    """Proposes varying numbers of tokens, which are hardly ever right."""

    def __init__(self) -> None:
        self._known = self._steps = 0

    @property
    def is_done(self) -> bool:
        """Whether there were steps with all numbers of drafts."""
        return self._steps > len(LENGTHS) * STEPS_EACH

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        self._steps += len(tokens) > self._known  # may be called twice for one step
        self._known = len(tokens)
        length = min(count, LENGTHS[self._steps // STEPS_EACH % len(LENGTHS)])
        return Proposal((0,) * length, "rehearsal") if length else None


def rehearse(executor: Executor, config: SchedulerConfig, costs: BatchCosts) -> None:
    """Run steps of one sequence, and let ``costs`` learn from all except the first of each kind.

    The executor is reset afterwards. An error only loses what would have been learned."""
    began = time.monotonic()
    try:
        for learns in (BatchCosts(), costs):
            _run(executor, config, learns, began + LONGEST_S)
    except Exception as error:
        logger.warning("cannot measure the costs of drafts: %s: %s", type(error).__name__, error)
    executor.reset()
    logger.info("measured the costs of drafts in %.2f s", time.monotonic() - began)


def _run(executor: Executor, config: SchedulerConfig, costs: BatchCosts, until: float) -> None:
    executor.reset()
    options = SpeculationOptions(tokens=MAX_DRAFT_TOKENS, adapts=False)
    source = _Varied()
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
    pending: deque[PendingStep] = deque()
    while not scheduler.idle:
        if source.is_done or time.monotonic() > until:
            scheduler.abort(request.request_id)
        plan = scheduler.schedule()
        if plan is not None:
            pending.append(executor.dispatch(plan))
        if len(pending) > (executor.spec.look_ahead and plan is not None):
            scheduler.apply(pending.popleft().read())
        scheduler.take_outputs()
