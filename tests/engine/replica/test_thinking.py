"""Budgets of reasoning on a whole engine: the same text in every batch, and from a resume on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared import wire
from tests.engine.whole import Whole
from tests.shared.submits import submit

PROMPTS = {"a": [5, 6, 7, 8], "b": [9, 10, 11], "c": list(range(20, 60))}
END = [3, 4]


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "ahead"])
def whole(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Whole:
    whole = Whole(tiny_model("llama"), num_blocks=256)
    whole.renew(look_ahead=request.param)
    return whole


def texts(whole: Whole, names: str, tokens: int | None, **fields: object) -> dict[str, list[int]]:
    budget = None
    if tokens is not None:
        budget = wire.ThinkingBudget(tokens=tokens, end_ids=END, is_open=True)
    for name in names:
        whole.submit(name, PROMPTS[name], 24, thinking=budget, **fields)
    whole.run()
    return {name: whole.texts[name] for name in names}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_same_alone_and_in_a_batch(whole: Whole, temperature: float) -> None:
    sampling = wire.SamplingParams(seed=3, temperature=temperature)
    free = texts(whole, "abc", None, sampling=sampling)
    together = texts(whole, "abc", 9, sampling=sampling)
    for name in "abc":
        assert texts(whole, name, 9, sampling=sampling)[name] == together[name]
        assert together[name][:9] == free[name][:9]
        assert together[name][9:11] == END
        assert len(together[name]) == 24
        before = [*PROMPTS[name], *together[name][:11]]
        whole.submit("rest", before, 13, sampling=wire.SamplingParams(seed=3))
        whole.run()
        if not temperature:  # it goes on from its own end of reasoning
            assert whole.texts["rest"] == together[name][11:]


def test_a_resumed_text_goes_on_as_it_would_have(whole: Whole) -> None:
    (full,) = texts(whole, "a", 9).values()
    budget = wire.ThinkingBudget(tokens=9, end_ids=END, is_open=True)
    for done in (3, 8, 9, 10, 11, 15):
        whole.texts["again"] = full[:done]
        whole.scheduler.submit(
            submit(
                "again",
                PROMPTS["a"],
                attempt=done,
                sampling=wire.SamplingParams(seed=7),
                max_tokens=24,
                generated=full[:done],
                thinking=budget,
            )
        )
        whole.run()
        assert whole.texts["again"] == full
