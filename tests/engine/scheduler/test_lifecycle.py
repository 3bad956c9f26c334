"""The life of a request, alone and beside others."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from engine.plan import StepResult
from engine.scheduler import Scheduler
from engine.scheduler.timing.time_share import MAX_LEAD_S
from shared import wire
from tests.engine.scheduler.fake_executor import sample
from tests.engine.scheduler.harness import Engine, config, prompt, request


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
def test_the_last_prompt_token_goes_through_the_decode_that_samples_output_0(length: int) -> None:
    engine = Engine(config())
    engine.serve(request("a", prompt(length)))
    assert sum(len(chunk.token_ids) for chunk in engine.chunks) == length - 1
    assert all((chunk.start + len(chunk.token_ids)) % 4 == 0 for chunk in engine.chunks[:-1])
    first = next(plan.decodes[0] for plan in engine.plans if plan.decodes)
    assert (first.position, first.output_index) == (length - 1, 0)
    assert first.token_id == prompt(length)[-1]


def test_live_says_how_much_of_a_prompt_is_computed() -> None:
    engine = Engine(config())
    engine.submit(request("a", prompt(40)))
    seen = []
    while engine.scheduler.live():
        seen.append(engine.scheduler.live()[0].computed_prompt_tokens)
        engine.turn()
    assert seen == [0, 16, 32, 39, 40, 40, 40, 40]
    again = engine.submit(request("b", prompt(40)))
    engine.turn()
    (live,) = engine.scheduler.live()
    assert (live.computed_prompt_tokens, live.cached_prompt_tokens) == (39, 36)
    engine.run()
    assert again.usage.cached_ram_tokens == 36


def test_a_stop_token_with_look_ahead_costs_one_discarded_decode() -> None:
    first = sample([1], 7, 0)
    engine = Engine(config(look_ahead=True))
    client = engine.serve(request("a", [1], max_tokens=9, stop_token_ids=[first]))
    assert sum(len(plan.decodes) for plan in engine.plans) == 2
    assert client.tokens == [first]


def test_stop_tokens_are_forbidden_until_min_tokens_are_reached() -> None:
    engine = Engine(config())
    stops = list(range(20))
    engine.serve(request("a", [1], max_tokens=20, min_tokens=3, stop_token_ids=stops))
    forbidden = [bool(plan.decodes[0].forbidden) for plan in engine.plans if plan.decodes]
    assert forbidden[:4] == [True, True, True, False]


def test_logprobs_reach_the_delta_of_their_token() -> None:
    scheduler = Scheduler(config())
    scheduler.submit(request("a", [1], logprobs=1))
    plan = scheduler.schedule()
    assert plan is not None and plan.decodes[0].logprobs == 1
    logprobs = wire.TokenLogprobs(chosen=-0.5)
    scheduler.apply(StepResult(step=0, tokens=(5,), logprobs=(logprobs,)))
    assert scheduler.take_outputs().deltas[0].logprobs == [logprobs]


def test_a_resumed_request_that_had_ended_ends_at_once() -> None:
    engine = Engine(config())
    full = engine.submit(request("a", [1], max_tokens=2, generated=[4, 5]))
    stopped = engine.submit(request("b", [1], generated=[4, 9], stop_token_ids=[9]))
    assert isinstance(full.answer, wire.Accepted)
    assert full.end is not None and (full.end.finish, full.end.index) == ("length", 2)
    assert stopped.end is not None and stopped.end.stop_token == 9
    assert engine.schedule() is None
    engine.assert_nothing_left()


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"prompt": []}, "invalid", "prompt"),
        ({"prompt": [-1]}, "invalid", "prompt"),
        ({"prompt": [2**31]}, "invalid", "prompt"),
        ({"generated": [-5]}, "invalid", "generated"),
        ({"stop_token_ids": [2**40]}, "invalid", "stop_token_ids"),
        ({"max_tokens": 0}, "invalid", "max_tokens"),
        ({"prompt": [1] * 200}, "too_large", "prompt"),
        ({"prompt": [1] * 64, "max_tokens": 6}, "too_large", "prompt"),
        (
            {"sampling": wire.SamplingParams(seed=1, logit_bias=[(20, 1.0)])},
            "invalid",
            "logit_bias",
        ),
        ({"thinking": wire.ThinkingBudget(tokens=1, end_ids=[])}, "invalid", "thinking"),
        ({"thinking": wire.ThinkingBudget(tokens=1, end_ids=[-1])}, "invalid", "thinking"),
        ({"thinking": wire.ThinkingBudget(tokens=-1, end_ids=[1])}, "invalid", "thinking"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_field_at_fault(
    fields: dict[str, Any], reason: str, param: str
) -> None:
    engine = Engine(config(blocks=16, vocab_size=20))
    client = engine.submit(request("a", **{"prompt": [1], **fields}))
    assert client.refusal == (reason, param)
    engine.assert_nothing_left()


def test_the_largest_request_that_fits_alone_is_served() -> None:
    engine = Engine(config(blocks=16))
    other = engine.submit(request("b", prompt(9)))
    client = engine.submit(request("a", prompt(60), max_tokens=5))
    engine.finish(client, other)


def test_a_second_submit_of_the_same_attempt_is_refused_and_a_newer_one_replaces_it() -> None:
    engine = Engine(config())
    old = engine.submit(request("a", prompt(5)))
    engine.turn()
    engine.scheduler.submit(request("a", prompt(5)))
    (refused,) = engine.scheduler.take_outputs().messages
    assert isinstance(refused, wire.Refused) and refused.reason == "invalid"
    engine.serve(request("a", prompt(9), attempt=2))
    assert old.end is None


@pytest.mark.parametrize("reason", ["draining", "full"])
def test_an_engine_that_takes_no_more_requests_finishes_those_it_has(reason: str) -> None:
    engine = Engine(config(max_sequences=1 if reason == "full" else 9))
    first = engine.submit(request("a", prompt(5)))
    if reason == "draining":
        engine.scheduler.drain()
    second = engine.submit(request("b", prompt(5)))
    assert second.refusal == (reason, None)
    engine.finish(first)


@pytest.mark.parametrize("turns", range(9))
def test_an_abort_at_any_moment_frees_the_slot_in_the_next_plan(
    turns: int, look_ahead: bool
) -> None:
    engine = Engine(config(look_ahead=look_ahead, store_enabled=True, completion_batch_size=1))
    engine.store_answers = turns != 0
    client = engine.submit(request("a", prompt(40), max_tokens=50))
    engine.run_turns(turns)
    engine.scheduler.abort("a", attempt=2)
    assert engine.scheduler.live(), "that attempt is not here"
    engine.scheduler.abort("a")
    assert not engine.scheduler.live()
    engine.store_answers = True
    engine.serve(request("b", prompt(4, start=1)))
    assert client.end is None
    assert engine.scheduler.stats().aborts_total == 1


def test_a_cleared_cache_has_no_prefix_and_frees_its_memory() -> None:
    engine = Engine(config())
    engine.serve(request("a", prompt(40)))
    assert engine.scheduler.cached_hashes()
    engine.scheduler.clear_cache()
    assert not engine.scheduler.cached_hashes()
    assert engine.serve(request("b", prompt(40))).cached == (0, 0)


def test_a_dropped_request_leaves_nothing_and_others_go_on() -> None:
    engine = Engine(config(look_ahead=True))
    for name in "abcdef":
        engine.submit(request(name, prompt(20, start=ord(name))))
    engine.run_turns(3)
    engine.scheduler.drop({(name, attempt) for name, attempt in engine.clients if name != "d"})
    assert {one.request_id for one in engine.scheduler.live()} == {"d"}
    engine.run()
    assert [name for (name, _), client in engine.clients.items() if client.end] == ["d"]
    engine.assert_nothing_left()


def test_the_oldest_prompt_is_done_first_and_streams_while_others_prefill() -> None:
    engine = Engine(config(prefill_chunk_tokens=32, blocks=300))
    clients = [engine.submit(request(name, prompt(80, ord(name)))) for name in "abcd"]
    engine.run()
    starts = [client.started_step for client in clients]
    assert starts == sorted(set(starts), key=lambda step: step or 0)
    decoded = [number for number, plan in enumerate(engine.plans) if plan.decodes]
    prefilled = [number for number, plan in enumerate(engine.plans) if plan.chunks]
    assert decoded[0] < prefilled[-1] and decoded[-1] > prefilled[-1]


def test_short_prompts_wait_for_one_chunk_of_a_long_one_which_goes_on(look_ahead: bool) -> None:
    engine = Engine(config(blocks=300, look_ahead=look_ahead, max_batch_size=8))
    long = engine.submit(request("long", prompt(190, 1)))
    engine.turn()
    waits, number = [], 0
    while not long.tokens:
        submitted, number = len(engine.plans), number + 1
        own = [number // 400 % 20, number // 20 % 20, number % 20, *prompt(6)]
        engine.answer(request(f"s{number}", own, max_tokens=1))
        waits.append(len(engine.plans) - submitted)
    # A chunk of the long one, its own, its decode. At the end the long one is not much longer.
    assert statistics.median(waits) <= 3 + look_ahead and max(waits) <= 12
    # Its own time is 0.19 s. Those that overtake get as much, and what they may be ahead.
    assert engine.now_s <= 2 * 0.19 + 2 * MAX_LEAD_S
    engine.finish(long)


def test_the_chunk_of_a_short_prompt_does_not_wait_for_those_of_long_ones() -> None:
    engine = Engine(config(prefill_chunk_tokens=200, prefill_batch_size=3))
    for name in "ab":
        engine.submit(request(name, prompt(100, ord(name)), priority=-1))
    engine.submit(request("short", prompt(9)))
    plan = engine.schedule()
    assert plan is not None and [len(chunk.token_ids) for chunk in plan.chunks] == [8]


def test_many_short_prompts_share_a_plan_within_the_chunk_limit() -> None:
    engine = Engine(config(prefill_chunk_tokens=64, prefill_batch_size=3))
    for name in "abcde":
        engine.submit(request(name, prompt(9, ord(name))))
    plan = engine.schedule()
    assert plan is not None and [len(chunk.token_ids) for chunk in plan.chunks] == [8, 8, 8]


def test_no_more_rows_decode_than_allowed_and_the_oldest_go_first() -> None:
    engine = Engine(config(max_batch_size=2, prefill_batch_size=8, prefill_chunk_tokens=200))
    clients = [engine.submit(request(name, prompt(9, ord(name)))) for name in "abcdef"]
    engine.run()
    starts = [client.started_step or 0 for client in clients]
    assert starts == sorted(starts) and len(set(starts)) == 3
    assert max(len(plan.decodes) for plan in engine.plans) == 2


def test_a_higher_priority_overtakes_in_the_queue() -> None:
    engine = Engine(config(completion_batch_size=1))
    engine.submit(request("first", prompt(9)))
    engine.turn()
    low = engine.submit(request("low", prompt(9)))
    high = engine.submit(request("high", prompt(9), priority=1))
    engine.run()
    assert (high.started_step or 0) < (low.started_step or 0)


def test_usage_says_where_the_time_went() -> None:
    engine = Engine(config(completion_batch_size=1))
    first = engine.submit(request("a", prompt(41), max_tokens=11))
    second = engine.submit(request("b", prompt(5)))
    engine.run()
    assert first.usage.prefill_s == pytest.approx(0.041, abs=1e-4)
    assert first.usage.decode_s == pytest.approx(0.010, abs=1e-4)
    assert second.usage.queue_s == pytest.approx(0.051, abs=1e-4)


def test_progress_and_counters_add_up() -> None:
    engine = Engine(config())
    for name in "abc":
        engine.submit(request(name, prompt(10, ord(name))))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.prompt_tokens_total == 30 and stats.prefill_tokens_total == 27
    assert stats.generated_tokens_total == stats.batch_rows_total == 15
    assert engine.scheduler.progress == 42
    assert stats.steps_total == len(engine.plans)
    assert stats.used_blocks + stats.free_blocks == stats.total_blocks == 64


def test_a_result_of_another_step_raises_value_error() -> None:
    engine = Engine(config())
    engine.submit(request("a", prompt(4)))
    with pytest.raises(ValueError, match="not the oldest"):
        engine.scheduler.apply(StepResult(step=0, tokens=()))
    engine.schedule()
    with pytest.raises(ValueError, match="not the oldest"):
        engine.scheduler.apply(StepResult(step=1, tokens=()))
