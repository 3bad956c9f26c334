"""Before there are requests, a replica computes like the first of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.executor.batched import BatchedExecutor
from engine.executor.steps import BatchedStep
from engine.plan import Plan
from engine.replica import rehearsal
from tests.engine.conftest import Wrap
from tests.engine.whole import Whole, random_tokens


@pytest.fixture
def plans(wrap: Wrap) -> list[Plan]:
    """The plans that are dispatched from now on."""
    seen: list[Plan] = []

    @wrap(BatchedExecutor, "dispatch")
    def dispatched(dispatch: Any, executor: Any, plan: Plan) -> BatchedStep:
        seen.append(plan)
        step: BatchedStep = dispatch(executor, plan)
        return step

    return seen


def test_a_start_that_proves_nothing_computes_all_the_same(
    llama: Path, tmp_path: Path, plans: list[Plan]
) -> None:
    Whole(llama, proofs=tmp_path)  # which leaves its proof
    plans.clear()
    replica = Whole(llama, proofs=tmp_path).replica
    lengths = [len(chunk.token_ids) for plan in plans for chunk in plan.chunks]
    assert lengths == [rehearsal.FIRST_TOKENS]
    assert sum(len(plan.decodes) for plan in plans) == rehearsal.FIRST_DECODES + 1
    scheduler = replica.scheduler
    assert scheduler.chunk_policy.pass_s > 0  # learned from these steps
    assert not scheduler.stats().steps_total and not scheduler.cached_hashes()


def test_large_models_compute_no_prompt_before_their_first_request(
    llama: Path, monkeypatch: pytest.MonkeyPatch, plans: list[Plan]
) -> None:
    monkeypatch.setattr(rehearsal, "LONGEST_DECODE_S", 0.0)
    Whole(llama)
    assert plans[-rehearsal.FIRST_DECODES].decodes and not plans[-rehearsal.FIRST_DECODES].chunks
    assert rehearsal.FIRST_TOKENS not in {len(c.token_ids) for plan in plans for c in plan.chunks}


def test_an_error_before_the_first_request_costs_nothing_else(
    llama: Path, tmp_path: Path, wrap: Wrap, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Whole(llama, proofs=tmp_path).serve("a", random_tokens(1, 30), 5)
    failures = iter([RuntimeError("no memory")])

    @wrap(BatchedExecutor, "dispatch")
    def dispatched(dispatch: Any, executor: Any, plan: Plan) -> BatchedStep:
        for failure in failures:
            raise failure
        step: BatchedStep = dispatch(executor, plan)
        return step

    again = Whole(llama, proofs=tmp_path)
    assert "no memory" in caplog.text
    assert again.serve("a", random_tokens(1, 30), 5) == expected
