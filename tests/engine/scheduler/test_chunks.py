"""Chunks are as long as their predicted time allows."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler.timing.chunks import (
    ALONE_TARGET_S,
    ALONE_TOKENS,
    MAX_TOKENS,
    MIN_TOKENS,
    MIN_UNIT_S,
    STREAMING_TARGET_S,
    UNIT_PASSES,
    ChunkPolicy,
    share_of_time,
)
from tests.engine.scheduler.harness import Engine, config, request


def learn(policy: ChunkPolicy, per_token_s: float, per_pair_s: float) -> None:
    """Let ``policy`` learn from prefills on a device of that speed, beside four streams."""

    def cost_s(start: int, tokens: int) -> float:
        return tokens * (per_token_s + per_pair_s * (start + tokens / 2))

    for _ in range(20):
        policy.observe_decodes(0.05)
    for _ in range(10):
        start = 0
        while start < 2000:
            tokens = policy.budget(streaming=True).take(start, 2000 - start)
            elapsed_s = 0.05 + policy.pass_s + cost_s(start, tokens)
            policy.observe_chunks([(start, tokens)], elapsed_s, beside_decodes=True)
            start += tokens
    for start in (0, 1000, 1900):
        assert policy.predict_s(start, 64) == pytest.approx(cost_s(start, 64), rel=0.15)


def observe(policy: ChunkPolicy, times: int, tokens: int, elapsed_s: float, **how: Any) -> None:
    """Let ``policy`` know a first chunk, so many times."""
    for _ in range(times):
        policy.observe_chunks([(0, tokens)], elapsed_s, **how)


def test_chunks_delay_running_streams_by_at_most_the_target() -> None:
    policy = ChunkPolicy(16)
    learn(policy, 2e-3, 2e-6)
    for start in (0, 512, 1024):
        streaming = policy.budget(streaming=True).take(start, 4000)
        alone = policy.budget(streaming=False).take(start, 4000)
        assert MIN_TOKENS <= streaming < alone <= MAX_TOKENS
        assert policy.predict_s(start, streaming) <= STREAMING_TARGET_S
        assert policy.predict_s(start, alone) <= ALONE_TARGET_S


def test_the_slowest_device_gets_chunks_of_the_least_size() -> None:
    policy = ChunkPolicy(16)
    learn(policy, 1.0, 0.0)
    assert policy.budget(streaming=True).take(0, 4000) == MIN_TOKENS


def test_a_fast_device_gets_the_largest_chunks_after_a_few_steps() -> None:
    policy = ChunkPolicy(16)
    for _ in range(10):
        tokens = policy.budget(streaming=True).take(0, 4096)
        policy.observe_chunks([(0, tokens)], tokens / 20_000)
    assert policy.budget(streaming=True).take(0, 4096) == MAX_TOKENS


@pytest.mark.parametrize("prompt", [1023, 1024, 1027, 1500, 2049, 7500])
def test_no_chunk_of_a_prompt_is_much_shorter_than_the_others(prompt: int) -> None:
    policy = ChunkPolicy(16)
    observe(policy, 10, 500, 0.01)
    tokens: list[int] = []
    while sum(tokens) < prompt:
        tokens.append(policy.budget(streaming=False).take(sum(tokens), prompt - sum(tokens)))
    assert len(tokens) == -(-prompt // MAX_TOKENS)
    assert max(tokens) - min(tokens) < 16 * len(tokens)


@pytest.mark.parametrize("pass_s", [1e-3, 0.05, 0.4])
def test_a_layer_of_a_chunk_takes_about_as_long_as_a_decode_step(pass_s: float) -> None:
    policy = ChunkPolicy(16, max_tokens=100_000, layers=30)
    policy.observe_decodes(pass_s)
    observe(policy, 20, 500, pass_s + 0.1)
    wanted_s = max(UNIT_PASSES * pass_s, MIN_UNIT_S)
    assert policy.unit_s(streaming=False) == wanted_s
    tokens = policy.budget(streaming=False).take(0, 50_000)
    assert 0.4 * wanted_s <= policy.predict_layer_s([(0, tokens)]) <= wanted_s


def test_slow_first_steps_do_not_make_chunks_of_a_prompt_alone_short() -> None:
    policy = ChunkPolicy(16, layers=30)
    policy.observe_decodes(0.03)
    observe(policy, 30, 300, 0.1, share=1 / 30)
    assert policy.budget(streaming=True).take(0, 1000) < ALONE_TOKENS
    alone = policy.budget(streaming=False)
    assert ALONE_TOKENS * 7 // 8 <= alone.take(0, 1000) <= ALONE_TOKENS
    assert policy.budget(streaming=False).take(5000, 2500) >= ALONE_TOKENS * 7 // 8
    assert ChunkPolicy(16, 64, layers=30).budget(streaming=False).take(0, 1000) == 64


def test_chunks_of_models_with_experts_are_longer_while_no_stream_runs() -> None:
    dense, experts = (
        ChunkPolicy(16, max_tokens=8192, layers=30, has_experts=it) for it in (False, True)
    )
    for policy in (dense, experts):
        policy.observe_decodes(0.02)
        observe(policy, 20, 500, 1.0)
    lengths = [
        policy.budget(streaming=streaming).take(0, 100_000)
        for policy in (dense, experts)
        for streaming in (True, False)
    ]
    assert lengths[2] == lengths[0] and lengths[3] > 5 * lengths[1]
    # What is computed without a break is as short as in other models: a layer, or a few.
    assert experts.unit_s(streaming=False) == dense.unit_s(streaming=False)


def test_a_layer_of_a_long_chunk_with_experts_takes_at_most_two_seconds() -> None:
    policy = ChunkPolicy(16, max_tokens=8192, layers=5, has_experts=True)
    policy.observe_decodes(0.02)
    observe(policy, 20, 500, 1.0)  # 2 ms a token
    assert policy.budget(streaming=False).take(0, 2048) == 2048
    tokens = policy.budget(streaming=False).take(0, 50_000)
    assert 1.5 < policy.predict_layer_s([(0, tokens)]) <= 2.0


def test_the_last_layer_of_a_chunk_costs_nothing() -> None:
    one, two, thirty = (ChunkPolicy(16, layers=n) for n in (1, 2, 30))
    chunks = [(5000, 900)]
    assert one.predict_layer_s(chunks) == two.predict_layer_s(chunks)
    assert two.predict_layer_s(chunks) == pytest.approx(29 * thirty.predict_layer_s(chunks))


def test_parts_of_a_pass_are_its_costly_layers() -> None:
    assert [share_of_time(0, 1, 1), share_of_time(0, 1, 2), share_of_time(1, 2, 2)] == [1, 1, 0]
    assert [share_of_time(0, 2, 5), share_of_time(2, 4, 5), share_of_time(3, 5, 5)] == [
        0.5,
        0.5,
        0.25,
    ]


def test_before_chunks_are_measured_a_token_of_one_costs_at_most_a_decode() -> None:
    policy = ChunkPolicy(16)
    slow_s = policy.predict_s(0, 10)
    policy.observe_decodes(1.0)
    assert policy.predict_s(0, 10) == slow_s
    policy.observe_decodes(1e-4)
    assert policy.predict_s(0, 10) == pytest.approx(slow_s * 1e-4 / 3e-3)
    observe(policy, 20, 500, 1.0)
    assert policy.predict_s(0, 500) == pytest.approx(1.0, rel=0.1), "measured times count"


def test_layers_are_measured_a_few_at_a_time() -> None:
    whole, divided = (ChunkPolicy(16, layers=8) for _ in "ab")
    for policy in (whole, divided):
        policy.observe_decodes(0.04)
    for start in (0, 500, 2000):
        whole.observe_chunks([(start, 400)], 0.04 + start / 1000)
        for layers in (1, 2, 5):
            seconds = (0.04 + start / 1000) * layers / 8
            divided.observe_chunks([(start, 400)], seconds, share=layers / 8)
    for start in (0, 1000):
        assert divided.predict_s(start, 400) == pytest.approx(whole.predict_s(start, 400), rel=0.02)


def test_a_pass_whose_time_is_used_up_takes_no_more_prompts() -> None:
    """Attention to a long prefix costs more than there is time for."""
    policy = ChunkPolicy(16, layers=30, on_gpu=True)
    learn(policy, 1e-3, 1e-5)
    policy.observe_decodes(0.001)
    budget = policy.budget(streaming=True)
    assert [budget.take(30_000, 64) for _ in range(3)] == [64, 0, 0]
    assert policy.tokens_within(0, -1.0) == 0


def test_long_prompts_share_no_pass_on_a_cpu() -> None:
    policy = ChunkPolicy(16, max_tokens=2048, layers=30)
    observe(policy, 10, 500, 0.01)
    budget = policy.budget(streaming=False)
    assert budget.take(0, 1000) == 1000 and not budget.take(0, 1000)
    budget = policy.budget(streaming=False)
    assert [budget.take(0, 100) for _ in range(4)] == [100, 100, 0, 0]


def test_the_chunks_of_a_pass_share_its_budget() -> None:
    budget = ChunkPolicy(16, fixed_tokens=128).budget(streaming=True)
    assert budget.take(0, 40) == 40
    assert budget.take(16, 300) == 64
    assert budget.take(0, 300) == 0
    assert budget.take(0, 24) == 24
    assert budget.take(0, 1) == 0


def test_chunks_of_one_pass_have_about_the_same_length() -> None:
    policy = ChunkPolicy(16, fixed_tokens=400)
    assert [policy.budget(streaming=True).take(0, n) for n in (100, 300)] == [100, 300]
    budget = policy.budget(streaming=True)
    assert budget.take(0, 100) == 100
    assert budget.take(0, 300) == 0, "the others would be padded to it"
    assert budget.take(0, 20) == 0, "it would be padded to the others"
    assert budget.take(0, 110) == 96
    assert budget.take(0, 90) == 90


@pytest.mark.parametrize("fixed", [1, 15, 16, 17, 1000])
def test_a_chunk_ends_with_a_block_or_with_the_prompt(fixed: int) -> None:
    policy = ChunkPolicy(16, fixed_tokens=fixed)
    start = 0
    while start < 333:
        start += policy.budget(streaming=False).take(start, 333 - start)
        assert start % 16 == 0 or start == 333


def test_a_gpu_gets_longer_chunks_within_the_same_time() -> None:
    policy = ChunkPolicy(16, max_tokens=2048)
    assert policy.budget(streaming=False).take(0, 4000) < MAX_TOKENS, "before anything is known"
    observe(policy, 10, 500, 0.01)
    assert policy.budget(streaming=True).take(0, 4096) == 2048
    learn(policy, 1e-3, 0.0)
    tokens = policy.budget(streaming=True).take(0, 4000)
    assert tokens < MAX_TOKENS and policy.predict_s(0, tokens) <= STREAMING_TARGET_S


@pytest.mark.parametrize("fixed", [None, 8192])
def test_a_chunk_of_a_gpu_is_shorter_after_a_long_prefix(fixed: int | None) -> None:
    """macOS stops an operation that takes seconds."""
    policy = ChunkPolicy(16, fixed, 8192, has_experts=True, layers=30, on_gpu=True)
    if fixed is None:
        learn(policy, 1e-3, 0.0)

    def longest(start: int) -> int:
        return policy.budget(streaming=False).take(start, 100_000)

    assert longest(0) > 4096 and longest(64_000) <= 2048 and longest(128_000) <= 1100
    on_cpu = ChunkPolicy(16, 8192, 8192)
    assert on_cpu.budget(streaming=False).take(128_000, 100_000) == 8192


@pytest.mark.parametrize(
    ("batches_chunks", "scored", "most"), [(True, None, 2), (False, None, 1), (True, 0, 1)]
)
def test_beside_decodes_there_is_one_pass_of_chunks(
    batches_chunks: bool, scored: int | None, most: int
) -> None:
    fields = {"look_ahead": True, "batches_chunks": batches_chunks, "prefill_chunk_tokens": 64}
    engine = Engine(config(blocks=300, **fields))
    engine.stream(request("streams", [1, 2, 3], max_tokens=150))
    for number in (4, 5):
        prompt = [number + i % 3 for i in range(29)]
        engine.submit(request(f"joins {number}", prompt, prompt_logprobs=scored))
    engine.finish(*engine.clients.values())
    beside = [len(plan.chunks) for plan in engine.plans if plan.decodes and plan.chunks]
    assert max(beside) == most and sum(beside) == 2


def test_chunks_that_cannot_share_a_pass_are_in_plans_of_their_own(look_ahead: bool) -> None:
    engine = Engine(config(look_ahead=look_ahead, batches_chunks=False, prefill_chunk_tokens=32))
    for number in (4, 5):
        engine.submit(request(f"r{number}", [number + i % 3 for i in range(14)]))
    engine.run()
    assert [len(plan.chunks) for plan in engine.plans if plan.chunks] == [1, 1]
