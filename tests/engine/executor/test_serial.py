"""The executor that runs one sequence at a time, as mlx-lm does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.executor.serial import SerialExecutor, measured_token_bytes
from engine.plan import Chunk, Decode
from shared.wire import TokenLogprobs
from tests.engine.executor.by_hand import (
    PENALIZED,
    PlanRunner,
    assert_logprobs,
    direct_logprobs,
    load,
    penalized,
    prompt,
)


@pytest.fixture(params=["mamba", "llama"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Any:
    return load(tiny_model(request.param, seed=1))


def test_the_serial_executor_gives_mlx_lms_tokens_under_controls_and_their_scores(
    model: Any,
) -> None:
    runner = PlanRunner(SerialExecutor(model, measured_token_bytes(model)), 1, 64)
    tokens, slot = prompt(41, 30), 0
    out: list[int] = []
    chunks = (
        Chunk(slot, 0, tuple(tokens[:12]), tuple(tokens[1:13]), 1),
        Chunk(slot, 12, tuple(tokens[12:-1]), tuple(tokens[13:]), 1),
    )
    result = runner.run(chunks=chunks)
    assert not result.prompt_logprobs  # the chunks wait until a piece of mlx-lm is full
    prompts: list[TokenLogprobs | None] = []
    for index in range(6):
        known = tokens + out
        history = None if index else tuple(known[:-1])
        at = slot, len(known) - 1, known[-1], index
        decode = Decode(*at, PENALIZED, logprobs=3, history=history)
        result = runner.run(decodes=(decode,))
        out += result.tokens
        prompts += [score for one in result.prompt_logprobs for score in one.logprobs]
        prompts += result.logprobs
    assert out == penalized(model, tokens, 6)
    direct = direct_logprobs(model, tokens + out)
    for position, ours in enumerate(prompts):
        assert ours is not None
        assert_logprobs(ours, direct[position], (tokens + out)[position + 1])
