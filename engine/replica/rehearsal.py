"""Steps that are run at startup, so that first requests do not wait for what later ones find in
place.

A process that finds its proof on disk has computed nothing yet. The first step reads code and
weights from disk, and the first chunk takes memory from the system: `warm_up`. On a device that
works while the next step is built, a step with drafts waits for the previous one, and the first
requests would have to find out what that costs: `rehearse`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.executor.base import Executor
from engine.executor.runner import StepRunner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.scheduler.timing.chunks import ChunkPolicy
from engine.speculation.batch_costs import BatchCosts
from engine.speculation.source import DraftSource, Proposal
from engine.speculation.speculator import MAX_DRAFT_TOKENS, SpeculationOptions, Speculator
from shared.wire import SamplingParams, Submit

logger = logging.getLogger(__name__)

FIRST_DECODES, FIRST_TOKENS = 3, 48
"""Of `warm_up`: steps of one token, and then a chunk of this length, which takes about as long as
ten more."""
LONGEST_DECODE_S = 0.05
"""If a step takes longer, the chunk is left out: first requests of such a model take so long that
they hardly notice."""
LENGTHS = (0, 2, 4, 8, MAX_DRAFT_TOKENS)
"""Numbers of drafts in the steps. Each is used for some tokens in turn. No sequence waits for one
draft alone."""
STEPS_EACH = 4
PROMPT_TOKENS = 32
WARM_UP_S, LONGEST_S = 4.0, 2.0
"""Of `rehearse`: time limits of the steps that compile kernels, and of those that are measured: a
larger model learns the rest from its first requests."""


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


def warm_up(executor: Executor, config: SchedulerConfig) -> ChunkPolicy:
    """Compute a few tokens and a short prompt. Return what their times say about chunks.

    The executor is reset afterwards. An error only loses what would have been prepared."""
    began = time.monotonic()
    executor.reset()
    scheduler = Scheduler(replace(config, store_enabled=False))
    policy, steps = scheduler.chunk_policy, StepRunner(executor)
    try:
        _compute(scheduler, steps, 1, FIRST_DECODES)
        if policy.pass_s <= LONGEST_DECODE_S:
            _compute(scheduler, steps, FIRST_TOKENS + 1, 1)
    except Exception as error:
        logger.warning("cannot compute before requests come: %s: %s", type(error).__name__, error)
    executor.reset()
    logger.info("warmed up in %.2f s", time.monotonic() - began)
    return policy


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
    _compute(
        scheduler,
        StepRunner(executor),
        PROMPT_TOKENS,
        (MAX_DRAFT_TOKENS + 1) * len(LENGTHS) * STEPS_EACH,
        stops=lambda: source.is_done or time.monotonic() > until,
    )
    return source.is_done


def _compute(
    scheduler: Scheduler,
    steps: StepRunner,
    prompt_tokens: int,
    max_tokens: int,
    stops: Callable[[], bool] = lambda: False,
) -> None:
    """Run a request to its end, or until ``stops``. Prompt and answer take a quarter of the context
    each at most."""
    most = scheduler.config.context_length // 4
    request = Submit(
        request_id="rehearsal",
        attempt=0,
        token_ids=[1] * min(prompt_tokens, most),
        max_tokens=min(max_tokens, most),
        sampling=SamplingParams(seed=0),
        stop_token_ids=[],
    )
    scheduler.submit(request)
    while not scheduler.idle:
        if stops():
            scheduler.abort(request.request_id)
        for result in steps.results(scheduler.schedule()):
            scheduler.apply(result)
        scheduler.take_outputs()
