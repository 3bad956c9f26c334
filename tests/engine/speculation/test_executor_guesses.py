"""Drafts that come with the result of the decode before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.speculation.sequence_drafts import DraftRow
from engine.speculation.source import ExecutorGuesses
from engine.speculation.speculator import SpeculationOptions, Speculator
from tests.engine.guesses import guessing
from tests.engine.scheduler.harness import Engine, config, request


@pytest.mark.parametrize(
    ("text", "proposed"),
    [
        ([1, 2], (7, 8, 9)),
        ([1, 2, 7], (8, 9)),
        ([1, 2, 7, 8, 9], None),  # nothing is left
        ([1, 2, 8], None),  # it went on otherwise
        ([1], None),  # it begins again
    ],
)
def test_guesses_are_proposed_as_long_as_the_text_goes_on_so(
    text: Sequence[int], proposed: tuple[int, ...] | None
) -> None:
    source = ExecutorGuesses("head")
    source.take(2, (7, 8, 9))
    found = source.propose(text, 5)
    assert (found.tokens if found else None) == proposed
    assert found is None or found.source == "head"


def test_right_guesses_are_verified_in_the_next_step(look_ahead: bool) -> None:
    asked = request("a", [1, 2, 3], max_tokens=40)

    def num_steps(wrong: float | None) -> int:
        speculator = guessing(lambda message: [], tokens=3, executor="head")
        engine = Engine(config(look_ahead=look_ahead), speculator)
        engine.executor.wrong_guesses = wrong
        client = engine.submit(asked)
        engine.run()
        engine.assert_right(client)
        return len(engine.plans)

    assert num_steps(0.0) <= num_steps(None) / 2


@pytest.mark.parametrize(("long_step_s", "guesses"), [(0.010, 5), (0.060, 0)])
def test_as_many_are_guessed_as_are_worth_verifying(long_step_s: float, guesses: int) -> None:
    speculator = Speculator(SpeculationOptions(tokens=5), [], "head")
    drafts = speculator.begin(request("a", [1]), None)
    assert drafts is not None
    for _ in range(20):
        speculator.observe_step(1, 0, 0.010)
        speculator.observe_step(1, 5, long_step_s)
    assert speculator.guesses_after(DraftRow(drafts, [1], 9), 1) == guesses
    assert speculator.guesses_after(DraftRow(drafts, [1], 3), 1) == min(guesses, 3)
