"""Sequences of batches fill what others leave, and give it back at once."""

from __future__ import annotations

import pytest

from shared import wire
from tests.engine.scheduler.harness import Client, Engine, config, request


def background(engine: Engine, name: str, prompt: list[int], max_tokens: int = 60) -> Client:
    priority = wire.BACKGROUND_PRIORITY
    return engine.submit(request(name, prompt, max_tokens=max_tokens, priority=priority))


def filled(engine: Engine, count: int, max_tokens: int = 60) -> list[Client]:
    """Submit ``count`` sequences of a batch, and run until all rows decode."""
    clients = [
        background(engine, f"b{number}", [number + 1] * 6, max_tokens) for number in range(count)
    ]
    engine.run_turns(60)
    assert all(client.tokens for client in clients[: engine.config.max_batch_size])
    return clients


@pytest.mark.parametrize(
    ("slots", "preempted", "steps"), [(8, 0, 3), (4, 1, 4)], ids=["a row", "a slot"]
)
def test_a_request_gets_what_a_batch_has_within_a_few_steps_of_its_prompt(
    look_ahead: bool, slots: int, preempted: int, steps: int
) -> None:
    engine = Engine(config(look_ahead=look_ahead, blocks=300, completion_batch_size=slots))
    batch = filled(engine, 4)
    before = engine.executor.steps
    asked = engine.stream(request("r", [9], max_tokens=5))
    assert engine.executor.steps - before <= steps  # those in flight, and its own
    computed = engine.scheduler.stats().prefill_tokens_total
    engine.finish(asked, *batch)
    stats = engine.scheduler.stats()
    assert stats.preemptions_total == preempted
    again = stats.prefill_tokens_total - computed
    assert again < engine.config.block_size  # the blocks of the preempted one were in the cache


def test_rows_go_to_requests_and_the_rest_to_the_batch() -> None:
    engine = Engine(config(blocks=300))
    filled(engine, 6)
    asked = [engine.submit(request(f"r{number}", [9], max_tokens=30)) for number in range(3)]
    engine.run_until(lambda: all(client.tokens for client in asked))
    assert len(engine.plans[-1].decodes) == 4  # three of them, one of the batch
    engine.run()


def test_memory_of_a_batch_is_room_for_a_request() -> None:
    engine = Engine(config(blocks=40))
    batch = filled(engine, 4, max_tokens=20)
    assert engine.scheduler.stats().unevictable_bytes == 0  # or requests would be refused
    asked = engine.answer(request("r", list(range(20)) * 5, max_tokens=5))
    engine.finish(asked, *batch)


def test_a_batch_never_overtakes_however_long_it_has_waited() -> None:
    engine = Engine(config(blocks=300, completion_batch_size=1))
    running = engine.submit(request("first", [9], max_tokens=20))
    old = background(engine, "old", [1, 2, 3], max_tokens=3)
    asked = [
        engine.submit(request(f"r{number}", [number % 9], max_tokens=1, priority=-(2**31)))
        for number in range(60)
    ]
    engine.run_until(lambda: all(client.end for client in asked))
    assert running.end and not old.tokens
    engine.finish(old)


def test_a_prompt_that_somebody_waits_for_is_computed_before_rows_of_a_batch() -> None:
    engine = Engine(config(blocks=300, prefill_chunk_tokens=4, context_length=200))
    filled(engine, 4)
    plans = len(engine.plans)
    engine.stream(request("r", list(range(20)) * 4, max_tokens=2))
    prompt_only = [plan for plan in engine.plans[plans:] if plan.chunks and not plan.decodes]
    decoding = [plan for plan in engine.plans[plans:] if plan.decodes and not plan.chunks]
    assert len(prompt_only) >= 19 and len(decoding) <= 2
    engine.run()
