"""The ranks other than 0: they run the plans of rank 0, and decide nothing."""

from __future__ import annotations

from engine.executor.base import Executor
from engine.executor.runner import StepRunner
from engine.parallel.errors import RankFailed
from engine.parallel.plans import PlanReceiver, unpack
from engine.parallel.progress import StepProgress
from engine.plan import Plan

LOOK_AHEAD_S = 0.05
"""How long the result of a step is not read, since the next plan may come and be dispatched before
it is there. Rank 0 sends it at once if it looks ahead."""


def follow(executor: Executor, plans: PlanReceiver, progress: StepProgress) -> None:
    """Run plans until the process is ended. Raises: `RankFailed`, and what steps raise."""
    runner = StepRunner(executor)
    while True:
        packed = plans.receive(None if runner.pending is None else LOOK_AHEAD_S)
        plan: Plan | None = None
        if packed is not None:
            progress.begin(packed)
            plan = unpack(packed)
        for result in runner.results(plan):
            if result.failed:
                raise RankFailed(f"a step failed: {result.failed[0][1]}")
            progress.finish(result.tokens)
