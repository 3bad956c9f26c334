"""The cost of the scheduler: its own time per step, with an executor that does nothing."""

from __future__ import annotations

import random
import statistics
import time

from bench.side import side
from engine.plan import Plan, StepResult
from engine.scheduler import Scheduler, SchedulerConfig
from shared.wire import SamplingParams, Submit

ROWS = 16
STEPS = 2000
WARM_UP_STEPS = 200
BLOCK_TOKENS = 16
BLOCK_BYTES = 737_280
"""A block of the demo model in fp32."""
SHARED_PREFIXES = 4
STOP = 2


def scheduling(model: str, runs: int) -> None:
    """Time steps of 16 rows: as chats end, others of 50 to 2,000 tokens arrive.

    Every second one has a shared prefix.
    """
    costs = [_cost_s(seed) for seed in range(runs)]
    with side("ours", model) as ours:
        step_s = statistics.median(ours.call("decode", [200] * ROWS, 8) for _ in range(runs))
    mean_s = statistics.median(costs)
    print(
        f"{1e3 * mean_s:.2f} ms a step on average; a decode step of {ROWS} rows takes "
        f"{1e3 * step_s:.1f} ms: {mean_s / step_s:.1%}"
    )


def _cost_s(seed: int) -> float:
    rng = random.Random(seed)
    prefixes = [_tokens(rng, 600) for _ in range(SHARED_PREFIXES)]
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=BLOCK_TOKENS,
            block_bytes=BLOCK_BYTES,
            limit_bytes=6000 * BLOCK_BYTES,
            context_length=8192,
            max_batch_size=ROWS,
            prefill_batch_size=8,
            completion_batch_size=2 * ROWS,
            namespace=b"bench",
            look_ahead=False,
        )
    )
    live = arrivals = 0
    spent_s = 0.0
    for step in range(WARM_UP_STEPS + STEPS):
        begun = time.perf_counter()
        while live < ROWS + 2:
            live, arrivals = live + 1, arrivals + 1
            shared = rng.choice(prefixes) if arrivals % 2 else []
            scheduler.submit(
                Submit(
                    request_id=str(arrivals),
                    attempt=0,
                    token_ids=shared + _tokens(rng, rng.randint(50, 1400)),
                    sampling=SamplingParams(seed=arrivals),
                    max_tokens=rng.randint(20, 400),
                    stop_token_ids=[STOP],
                )
            )
        plan = scheduler.schedule()
        if plan is not None:
            scheduler.apply(_result(plan, rng))
        live -= sum(delta.finish is not None for delta in scheduler.take_outputs().deltas)
        if step >= WARM_UP_STEPS:
            spent_s += time.perf_counter() - begun
    return spent_s / STEPS


def _result(plan: Plan, rng: random.Random) -> StepResult:
    seconds = 0.03 + 0.003 * len(plan.decodes)
    seconds += sum(0.001 * len(chunk.token_ids) for chunk in plan.chunks)
    tokens = tuple(rng.choices(range(3, 3000), k=len(plan.decodes)))
    return StepResult(step=plan.step, tokens=tokens, elapsed_s=seconds)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(3, 3000), k=count)
