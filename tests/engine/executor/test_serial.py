"""The executor that runs one sequence at a time, as mlx-lm does."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.executor.serial import SerialExecutor, measured_token_bytes
from engine.plan import Chunk, Decode, SlabSpec, Slot
from shared.wire import TokenLogprobs
from tests.engine.executor.by_hand import (
    GREEDY,
    PENALIZED,
    PlanRunner,
    alone,
    assert_logprobs,
    direct_logprobs,
    load,
    penalized,
    prompt,
)
from tests.tiny_models import Kind


@pytest.mark.parametrize("kind", ["mamba", "llama"])
def test_the_serial_executor_gives_the_tokens_of_mlx_lm(kind: Kind, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    runner = PlanRunner(SerialExecutor(model, measured_token_bytes(model)))
    for number, length in enumerate((30, 1, 12)):
        tokens, slot = prompt(number, length), Slot(number, 0)
        out: list[int] = []
        if length > 1:
            slabs = (SlabSpec(number, 1, 64),)
            chunks = (Chunk(slot, 0, tuple(tokens[:5])), Chunk(slot, 5, tuple(tokens[5:-1])))
            runner.run(new_slabs=slabs, chunks=chunks)
        for index in range(5):
            token = out[-1] if out else tokens[-1]
            decode = Decode(slot, length - 1 + index, token, index, GREEDY)
            out += runner.run(decodes=(decode,)).tokens
        runner.run(freed_slabs=(number,))
        assert out == alone(model, tokens, 5)


@pytest.mark.parametrize("kind", ["mamba", "llama"])
def test_the_serial_executor_applies_the_same_controls(kind: Kind, tmp_path: Path) -> None:
    model = load(kind, tmp_path)
    runner = PlanRunner(SerialExecutor(model, measured_token_bytes(model)))
    tokens, slot = prompt(41, 30), Slot(0, 0)
    out: list[int] = []
    chunks = (
        Chunk(slot, 0, tuple(tokens[:12]), tuple(tokens[1:13]), 1),
        Chunk(slot, 12, tuple(tokens[12:-1]), tuple(tokens[13:]), 1),
    )
    result = runner.run(new_slabs=(SlabSpec(0, 1, 64),), chunks=chunks)
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
