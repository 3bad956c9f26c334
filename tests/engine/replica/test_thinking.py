"""Budgets of reasoning on a whole engine: the same text in every batch, and from a resume on."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import wire
from tests.engine.whole import Whole

PROMPTS = {"a": [5, 6, 7, 8], "b": [9, 10, 11], "c": list(range(20, 60))}
END = [3, 4]
BUDGET = wire.ThinkingBudget(tokens=9, end_ids=END, is_open=True)


@pytest.fixture(scope="module")
def engine(llama: Path) -> Whole:
    return Whole(llama, num_blocks=256)


@pytest.fixture
def whole(engine: Whole, look_ahead: bool) -> Whole:
    engine.renew(look_ahead)
    return engine


def texts(whole: Whole, names: str, **fields: object) -> dict[str, list[int]]:
    for name in names:
        whole.submit(name, PROMPTS[name], 24, **fields)
    whole.run()
    return {name: whole.texts[name] for name in names}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_same_alone_and_in_a_batch(whole: Whole, temperature: float) -> None:
    sampling = wire.SamplingParams(seed=3, temperature=temperature)
    free = texts(whole, "abc", sampling=sampling)
    together = texts(whole, "abc", sampling=sampling, thinking=BUDGET)
    for name in "abc":
        assert texts(whole, name, sampling=sampling, thinking=BUDGET)[name] == together[name]
        assert together[name][:9] == free[name][:9]
        assert together[name][9:11] == END
        assert len(together[name]) == 24
        if not temperature:  # it goes on from its own end of reasoning
            before = [*PROMPTS[name], *together[name][:11]]
            assert whole.serve("rest", before, 13) == together[name][11:]


def test_a_resumed_text_goes_on_as_it_would_have(whole: Whole) -> None:
    (full,) = texts(whole, "a", thinking=BUDGET).values()
    for done in (3, 8, 9, 10, 11, 15):
        fields = {"attempt": done, "generated": full[:done], "thinking": BUDGET}
        assert whole.serve("again", PROMPTS["a"], 24, **fields) == full
