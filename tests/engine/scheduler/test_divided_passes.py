"""Passes of chunks that are computed a stretch of layers at a time, with others in between."""

from __future__ import annotations

import pytest

from engine.plan import StepResult
from engine.scheduler.planning.plan_builder import InFlightStep, PlannedStretch
from engine.scheduler.timing.chunks import GPU_MIN_UNIT_S, MIN_TOKENS, MIN_UNIT_S
from engine.scheduler.timing.time_share import MAX_BALANCE_S, TimeShare
from engine.speculation.speculator import Speculator
from tests.engine.guesses import guessing
from tests.engine.scheduler.fake_executor import expected
from tests.engine.scheduler.harness import Client, Engine, config, prompt, request

LAYERS = 30


def engine(speculator: Speculator | None = None, **changes: object) -> Engine:
    fields = {"blocks": 900, "context_length": 1500, "prefill_chunk_tokens": 400}
    return Engine(config(layers=LAYERS, **fields | changes), speculator)


def begin_streams(made: Engine, count: int, max_tokens: int = 100) -> list[Client]:
    streams = [
        made.submit(request(f"stream {n}", [n, 5, 6], max_tokens=max_tokens)) for n in range(count)
    ]
    made.run_until(lambda: all(stream.tokens for stream in streams))
    return streams


def ends_of(made: Engine, number: int) -> list[int]:
    """Return how far each stretch of pass ``number`` came."""
    return [
        stretch.end for plan in made.plans for stretch in plan.stretches if stretch.number == number
    ]


def test_a_long_prompt_is_computed_a_few_layers_at_a_time(look_ahead: bool) -> None:
    made = engine(look_ahead=look_ahead)
    made.serve(request("long", prompt(401)))
    (begun,) = [plan for plan in made.plans if plan.chunks]
    ends = ends_of(made, begun.step)
    assert ends == sorted(set(ends)) and ends[-1] == LAYERS
    # 0.4 s of this executor, in pieces that nobody notices.
    unit_s = GPU_MIN_UNIT_S if look_ahead else MIN_UNIT_S
    assert 0.4 / unit_s / 2 <= len(ends) <= LAYERS


def test_a_short_prompt_is_computed_whole_in_one_plan() -> None:
    made = engine()
    made.serve(request("before", prompt(101), max_tokens=1))
    made.plans.clear()
    made.serve(request("short", prompt(4, 1)))
    assert len([chunk for plan in made.plans for chunk in plan.chunks]) == 1
    assert not any(plan.stretches for plan in made.plans)


@pytest.mark.parametrize(("share", "look_ahead"), [(0.2, True), (0.5, False), (0.8, True)])
def test_streams_get_their_share_of_the_time(look_ahead: bool, share: float) -> None:
    made = engine(look_ahead=look_ahead, streams_share=share, blocks=4000, max_batch_size=5)
    streams = begin_streams(made, 4, max_tokens=int(150 / (1 - share)))
    first, began_s = len(made.plans), made.now_s
    long = made.stream(request("long", prompt(601)))
    taken_s = made.now_s - began_s
    decodes = sum(len(plan.decodes) for plan in made.plans[first:])
    # A decode takes 1 ms here. What is owed at the end is a stretch, or what one took too much.
    assert decodes * 0.001 == pytest.approx(share * taken_s, rel=0.1, abs=2 * MIN_UNIT_S)
    assert taken_s == pytest.approx(0.6 / (1 - share), rel=0.15)
    made.finish(*streams, long)


def test_streams_get_their_share_while_all_of_them_wait_for_drafts() -> None:
    drafts = guessing(lambda message: [*message.token_ids, *expected(message, 1500)[0]], 0.0, 4)
    made = engine(drafts, look_ahead=True, blocks=4000, max_batch_size=5)
    streams = begin_streams(made, 2, max_tokens=1400)
    first, began_s = len(made.plans), made.now_s
    long = made.stream(request("long", prompt(601)))
    taken_s = made.now_s - began_s
    plans = made.plans[first:]
    tokens = sum(1 + len(decode.drafts) for plan in plans for decode in plan.decodes)
    assert any(decode.drafts for plan in plans for decode in plan.decodes)
    assert all(not stream.end for stream in streams)
    assert tokens * 0.001 == pytest.approx(taken_s / 2, rel=0.1)
    made.scheduler.abort("stream 0")
    made.scheduler.abort("stream 1")
    made.finish(long)


def test_without_look_ahead_tokens_never_wait_for_a_stretch_in_their_own_plan() -> None:
    made = engine()
    streams = begin_streams(made, 2, max_tokens=200)
    long = made.submit(request("long", prompt(801)))
    made.finish(*streams, long)
    assert not any(plan.decodes and (plan.chunks or plan.stretches) for plan in made.plans)


def test_the_time_of_a_step_that_adds_pages_says_nothing_about_chunks() -> None:
    made = engine(prefill_chunk_tokens=None)
    made.executor.resize_s = 10.0
    made.serve(request("first", prompt(401)))
    policy = made.scheduler.planner._chunk_policy
    assert policy.predict_s(0, 100) < 0.3, "three times as long as they take"


def test_the_time_of_the_first_layers_of_a_pass_says_nothing_about_the_others() -> None:
    made = engine(prefill_chunk_tokens=None)
    made.executor.begin_s = 10.0
    for number in range(3):
        made.serve(request(f"{number}", prompt(401, number)))
    policy = made.scheduler.planner._chunk_policy
    assert 0.05 < policy.predict_s(0, 100) < 0.15, "it takes 0.1 s"


def test_the_last_layer_of_a_chunk_says_nothing_about_the_others() -> None:
    made = engine(prefill_chunk_tokens=None)
    for number in range(3):
        made.serve(request(f"{number}", prompt(401, number)))
    policy = made.scheduler.planner._chunk_policy
    before_s = policy.predict_s(0, 100)
    policy.observe_chunks = None  # type: ignore[method-assign, assignment]  # it must not be called
    step = InFlightStep(1)
    step.stretch = PlannedStretch([(0, 400)], 0.0, False, None, False)
    made.scheduler._meter.measure(step, StepResult(step=1, tokens=(), elapsed_s=1e-6))
    assert policy.predict_s(0, 100) == before_s > 0.05


def test_an_end_that_takes_longer_than_a_decode_step_has_a_pass_while_streams_run() -> None:
    made = engine(decodes_ends=True)
    made.serve(request("before", prompt(101), max_tokens=1))
    (stream,) = begin_streams(made, 1)
    policy = made.scheduler.planner._chunk_policy
    assert policy.predict_s(0, 4) < MIN_UNIT_S < policy.predict_s(0, 32)
    for length, joins in ((33, False), (5, True)):
        first = len(made.plans)
        made.answer(request(f"{length}", prompt(length, length), max_tokens=1))
        plans = made.plans[first:]
        assert any(decode.before for plan in plans for decode in plan.decodes) == joins
        assert any(plan.chunks for plan in plans) != joins
    made.finish(stream)


def test_a_short_prompt_joins_the_next_decode_of_running_streams() -> None:
    made = engine(decodes_ends=True)
    made.serve(request("before", prompt(101), max_tokens=1))
    (stream,) = begin_streams(made, 1)
    for number in range(3):
        made.run_turns(5)
        client = made.submit(request(f"short {number}", prompt(9, number), max_tokens=1))
        made.turn()
        assert client.end is not None, "it waited for a decode without it"
    made.finish(stream)


def test_ends_of_prompts_take_turns_with_streams_and_with_long_prompts() -> None:
    made = engine(decodes_ends=True)
    made.serve(request("before", prompt(101), max_tokens=1))
    (stream,) = begin_streams(made, 1, max_tokens=900)
    long = made.submit(request("long", prompt(401)))
    begun_s, begun, number = made.now_s, len(made.plans), 0
    while not long.tokens:
        number += 1
        made.answer(request(f"end {number}", prompt(12, number), max_tokens=1))
        # A row takes a thousandth of a second, and half of the time is for decodes.
        rows = sum(len(plan.decodes) for plan in made.plans[begun:])
        assert number % 5 or rows >= 450 * (made.now_s - begun_s - MIN_UNIT_S)
    plans = [plan for plan in made.plans if any(decode.before for decode in plan.decodes)]
    assert len(plans) > 5
    made.finish(stream, long)


def test_ends_that_take_longer_than_predicted_leave_streams_their_share() -> None:
    made = engine(decodes_ends=True)
    made.serve(request("before", prompt(101), max_tokens=1))
    (stream,) = begin_streams(made, 1, max_tokens=900)
    made.executor.end_token_s = 0.002
    begun_s, known = made.now_s, len(stream.tokens)
    for number in range(30):
        made.answer(request(f"end {number}", prompt(6, number), max_tokens=1))
    # A token of the stream takes a thousandth of a second.
    assert len(stream.tokens) - known >= 450 * (made.now_s - begun_s - 2 * MIN_UNIT_S)
    made.finish(stream)


def test_a_newcomer_is_computed_between_two_layers_of_a_long_prompt(look_ahead: bool) -> None:
    made = engine(look_ahead=look_ahead)
    long = made.submit(request("long", prompt(1201)))
    made.run_turns(4)
    begun = next(plan.step for plan in made.plans if plan.chunks)
    arrived_s = made.now_s
    made.answer(request("short", prompt(33, 3), max_tokens=1))
    assert 0 < ends_of(made, begun)[-1] < LAYERS, "the pass of the long one is open"
    own_s = 0.033
    # A stretch of the long one, and with look-ahead another one that is planned already.
    assert made.now_s - arrived_s <= own_s + (2 + 2 * look_ahead) * MIN_UNIT_S
    made.finish(long)


def test_a_cancelled_prompt_stops_at_the_next_layer(look_ahead: bool) -> None:
    made = engine(look_ahead=look_ahead)
    made.submit(request("cancelled", prompt(401)))
    made.run_turns(3)
    (begun,) = [plan.step for plan in made.plans if plan.chunks]
    before = len(made.plans)
    made.scheduler.abort("cancelled")
    made.finish()
    plans = made.plans[before:]
    assert [plan.dropped_passes for plan in plans if plan.dropped_passes] == [(begun,)]
    assert not any(plan.stretches for plan in plans)
    assert not made.executor.passes


def test_one_of_several_short_prompts_in_a_pass_is_cancelled_and_the_others_go_on() -> None:
    made = engine(prefill_batch_size=3, completion_batch_size=3)
    made.executor.speed_tokens_s = 100.0
    others = [made.submit(request(name, prompt(30, ord(name)))) for name in "abc"]
    made.run_until(lambda: made.executor.passes)
    (one,) = made.executor.passes.values()
    assert len(one.chunks) == 3
    made.scheduler.abort("b")
    late = made.submit(request("late", prompt(30, 4)))
    made.finish(others[0], others[2], late)
    assert others[1].end is None


def test_those_with_the_same_new_prefix_wait_for_its_pass_and_restore_it() -> None:
    made = engine()
    shared = prompt(400)
    clients = [made.submit(request(f"r{n}", [*shared, n, n])) for n in range(4)]
    made.finish(*clients)
    assert len([chunk for chunk in made.chunks if len(chunk.token_ids) > 8]) == 1
    assert [client.cached[0] for client in clients] == [0, 400, 400, 400]


@pytest.mark.parametrize("blocks", [1, 10])
def test_a_prompt_does_not_wait_for_a_long_pass_that_has_little_of_it(blocks: int) -> None:
    made = engine()
    made.executor.speed_tokens_s = 100.0
    shared = prompt(4 * blocks)
    long = made.submit(request("long", [*shared, *prompt(380, 7)]))
    made.run_until(lambda: made.executor.passes)
    short = made.submit(request("short", [*shared, 1, 2]))
    made.run_until(lambda: short.tokens)
    assert made.executor.passes and not long.tokens
    made.finish(short, long)


def test_activations_of_a_pass_are_in_the_ledger() -> None:
    made = engine(pass_token_bytes=500)
    made.submit(request("long", prompt(401)))
    used = made.scheduler.memory.ledger.used_bytes
    made.turn()
    memory = made.scheduler.memory
    assert memory.pass_bytes == (400 - 64) * 500
    assert memory.ledger.used_bytes >= used + memory.pass_bytes
    assert made.scheduler.stats().unevictable_bytes >= memory.pass_bytes
    made.run()
    assert memory.pass_bytes == 0


def test_with_little_memory_chunks_are_shorter() -> None:
    made = engine(blocks=250, context_length=700, pass_token_bytes=1000)
    made.serve(request("long", prompt(601)))
    assert 64 <= max(len(chunk.token_ids) for chunk in made.chunks) < 400


def test_a_chunk_that_raises_between_two_layers_ends_only_its_own_request(look_ahead: bool) -> None:
    made = engine(look_ahead=look_ahead, prefill_batch_size=2)
    made.executor.speed_tokens_s = 100.0
    failing, other = (made.submit(request(name, prompt(30, ord(name)))) for name in "ab")
    made.run_until(lambda: made.executor.passes)
    made.executor.fail_next_chunk = True
    made.finish(other)
    assert failing.error == "the chunk raised"


@pytest.mark.parametrize("tokens", [130, 200, 255, 300])
def test_chunks_are_planned_where_large_blocks_leave_no_memory_for_them(tokens: int) -> None:
    made = engine(block_size=128, blocks=12, pass_token_bytes=10**9, prefill_chunk_tokens=None)
    made.serve(request("one", prompt(tokens)))


def test_prompts_have_a_turn_although_a_layer_takes_longer_than_what_they_may_be_owed() -> None:
    share = TimeShare(0.5)
    for _ in range(100):
        share.decoded(0.1)
    assert share.is_turn_of_prompts(3 * MAX_BALANCE_S)


def test_with_look_ahead_time_that_is_owed_is_spent_once() -> None:
    made = engine(look_ahead=True, blocks=4000, max_batch_size=5)
    begin_streams(made, 4, max_tokens=1400)
    first = len(made.plans)
    made.stream(request("long", prompt(1201)))
    busy = [bool(plan.chunks or plan.stretches) for plan in made.plans[first:]]
    in_a_row = sum(map(bool.__and__, busy, busy[1:]))
    assert sum(busy) > 10 and in_a_row <= 1


def test_a_stretch_that_nobody_waited_for_is_no_debt() -> None:
    """Of two prompts without streams the second one is not behind when the first one streams."""
    made = engine(look_ahead=False, prefill_chunk_tokens=100)
    first = made.submit(request("first", prompt(101), max_tokens=50))
    second = made.submit(request("second", prompt(801, start=3)))
    made.run_until(lambda: first.tokens)
    number = len(made.plans)
    made.run_until(lambda: any(plan.chunks or plan.stretches for plan in made.plans[number:]))
    # One stretch of the first prompt took some tens of decode steps of 1 ms.
    assert sum(len(plan.decodes) for plan in made.plans[number:]) < 0.6 * MIN_UNIT_S / 0.001 + 2
    made.finish(second)


@pytest.mark.parametrize("score_bytes", [0, 6])
def test_chunks_far_into_a_prompt_are_shorter_where_scores_are_stored(score_bytes: int) -> None:
    made = engine(blocks=4000, score_bytes=score_bytes)
    config, memory = made.scheduler.config, made.scheduler.memory
    client = made.submit(request("long", prompt(1401)))
    most = 0
    while not client.end:
        made.turn()
        for one in made.scheduler.planner.passes:
            (chunk,) = one.chunks
            if chunk.tokens > MIN_TOKENS:
                assert memory.pass_bytes == chunk.tokens * chunk.end * score_bytes
            most = max(most, memory.pass_bytes)
    chunks = [len(chunk.token_ids) for chunk in made.chunks]
    if score_bytes:
        assert chunks[0] > 2 * chunks[-2] >= MIN_TOKENS, chunks
        assert config.limit_bytes / 8 < most <= config.limit_bytes / 4
    else:
        assert chunks == [400, 400, 400, 200]
    made.finish(client)
    assert memory.pass_bytes == 0
