"""The ranks other than 0: they run the plans of rank 0, and decide nothing."""

from __future__ import annotations

from engine.executor.base import Executor
from engine.executor.runner import StepRunner
from engine.parallel.errors import RankFailed
from engine.parallel.plans import PlanReceiver, RankBlocks, StoredName, stored_name, unpack
from engine.parallel.progress import StepProgress
from engine.plan import Plan

LOOK_AHEAD_S = 0.05
"""How long the result of a step stays unread, because the next plan may arrive and be dispatched
before it is ready. Rank 0 sends that plan immediately if it looks ahead."""


def follow(
    executor: Executor, plans: PlanReceiver, progress: StepProgress, blocks: RankBlocks | None
) -> None:
    """Run plans until the process is killed. Raises: `RankFailed`, and what steps raise."""
    runner = StepRunner(executor)
    exported_names: dict[int, StoredName] = {}
    while True:
        packed = plans.receive(None if runner.pending is None else LOOK_AHEAD_S)
        plan: Plan | None = None
        if packed is not None:
            progress.begin(packed)
            received = unpack(packed)
            if blocks is not None and received.released:
                blocks.release(received.released)
            plan = received.with_payloads(blocks)
            inserted = {insert.block_id for insert in plan.inserts}
            for name in plan.names:
                if name.block_id not in inserted:
                    exported_names[name.block_id] = stored_name(name)
        for result in runner.results(plan):
            if result.failed:
                raise RankFailed(f"a step failed: {result.failed[0][1]}")
            progress.finish(result.tokens)
            for block_id, payload in result.exported:
                if (found := exported_names.pop(block_id, None)) and blocks is not None:
                    blocks.store(found, payload)
