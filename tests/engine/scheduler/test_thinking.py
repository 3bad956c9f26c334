"""Reasoning ends when its budget is used up, wherever and however often a sequence is run."""

from __future__ import annotations

import pytest

from engine.scheduler.sequences.thinking import ThinkingProgress
from shared import wire
from tests.engine.scheduler.harness import Engine, config, request

END = [91, 92, 93]  # the tokens that the executor samples are less


def budget(
    tokens: int, *, is_open: bool = True, start: tuple[int, ...] = ()
) -> wire.ThinkingBudget:
    return wire.ThinkingBudget(tokens=tokens, end_ids=END, start_ids=list(start), is_open=is_open)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_end_follows_so_many_tokens_of_reasoning(tokens: int, look_ahead: bool) -> None:
    engine = Engine(config(look_ahead=look_ahead))
    limited = engine.submit(request("a", [1, 2, 3], max_tokens=20, thinking=budget(tokens)))
    free = engine.submit(request("b", [1, 2, 3], max_tokens=20))
    engine.finish(limited, free)
    assert limited.tokens[:tokens] == free.tokens[:tokens]
    assert limited.tokens[tokens : tokens + 3] == END
    assert not {*limited.tokens[tokens + 3 :]} & {*END}


def test_only_the_steps_in_question_wait_for_the_token_before() -> None:
    engine = Engine(config(look_ahead=True))
    engine.submit(request("a", [1, 2, 3], max_tokens=20, thinking=budget(9)))
    engine.run()
    read = [d.output_index for p in engine.plans for d in p.decodes if d.token_id is not None]
    assert read == [0, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("outputs", "forced"),
    [
        ([], None),
        ([1, 2, 3], 91),
        ([1, 2, 91], 92),  # it has begun the end by itself
        ([1, 91, 92, 93], None),
        ([1, 91, 92, 93, 4], None),
        ([1, 91, 92, 93, 50, 51], None),  # it reasons again
        ([1, 91, 92, 93, 50, 51, 4], 91),
        ([1, 2, 3, 91, 5], 91),
    ],
)
def test_what_is_forced_depends_on_the_outputs(outputs: list[int], forced: int | None) -> None:
    progress = ThinkingProgress(budget(3, start=(50, 51)))
    progress.follow(outputs)
    assert progress.forced() == forced


def test_reasoning_that_the_model_begins_is_limited() -> None:
    progress = ThinkingProgress(budget(2, is_open=False, start=(50,)))
    progress.follow([1, 2, 3, 4, 50, 6])
    assert progress.forced() is None and progress.may_force_after_next()
    progress.follow([7])
    assert progress.forced() == 91
