"""Models with recurrent layers: where snapshots are taken, and what is reused of prefixes."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler.memory import Memory
from engine.scheduler.planning.plan_builder import InFlightStep
from engine.scheduler.planning.snapshot_policy import (
    MAX_INNER_SNAPSHOTS,
    PROMPT_TAIL_TOKENS,
    WORTHWHILE_TOKENS,
)
from engine.scheduler.pools.snapshot_pool import SnapshotPool
from engine.scheduler.scheduler import discard_failed
from shared import wire
from tests.engine.scheduler.harness import RECURRENT, Engine, config, request, sequence

SHARED = [position * position % 19 for position in range(600)]
BLOCK = 4

ROOMY = {"blocks": 2000, "blocks_per_page": 1, "context_length": 700, "prefill_chunk_tokens": 64}


@pytest.fixture
def hybrid(look_ahead: bool) -> dict[str, Any]:
    """Changes of `config` for a model with both recurrent layers and attention."""
    return ROOMY | RECURRENT["hybrid"] | {"look_ahead": look_ahead}


@pytest.fixture(params=[("hybrid", False), ("recurrent", True)], ids=["hybrid", "recurrent, ahead"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Changes of `config` for that model, and for one with recurrent layers only. The other pairs
    are in `test_properties.py`."""
    kind, look_ahead = request.param
    return ROOMY | RECURRENT[kind] | {"look_ahead": look_ahead}


def test_the_same_prompt_again_computes_only_its_end(settings: dict[str, Any]) -> None:
    engine = Engine(config(**settings))
    engine.serve(request("a", SHARED[:301]))
    first = engine.computed
    assert first == 300
    again = engine.serve(request("b", SHARED[:301]))
    assert engine.computed - first == 300 - again.cached[0] < PROMPT_TAIL_TOKENS + BLOCK


def test_the_next_turn_computes_only_what_is_new(settings: dict[str, Any]) -> None:
    engine = Engine(config(**settings))
    history = SHARED[:5]
    for turn in range(30):
        done = len(history)
        client = engine.serve(request(f"t{turn}", history, max_tokens=11))
        if turn:
            # The new tokens, less than a block of the turn before, and its last token.
            assert done - client.cached[0] <= 2 + BLOCK
        history = [*history, *client.tokens, turn % 19, 1]
    assert engine.scheduler.stats().kept_states <= 12


def test_an_answer_missing_from_later_turns_costs_the_end_of_its_prompt(
    settings: dict[str, Any],
) -> None:
    engine = Engine(config(**settings))
    prompt = SHARED[:50]
    for turn in range(20):
        client = engine.serve(request(f"t{turn}", prompt, max_tokens=20))
        if turn:
            assert len(prompt) - client.cached[0] <= 9 + PROMPT_TAIL_TOKENS + BLOCK
        # The next turn has neither the template's beginning of the answer nor its reasoning.
        prompt = [*prompt[: 2 - PROMPT_TAIL_TOKENS], *client.tokens[-5:], turn % 19, 1, 2, 3, 4]


def test_a_third_prompt_goes_on_where_two_parted(settings: dict[str, Any]) -> None:
    engine = Engine(config(**settings))
    system = SHARED[:203]
    clients = [engine.serve(request(f"{n}", [*system, *[n] * 90])) for n in range(3)]
    assert [client.cached[0] for client in clients] == [0, 0, 200]


@pytest.mark.parametrize("tails", [[3] * 8, [3, 17, 90, 4, 33, 2, 8, 70]])
def test_arrivals_with_the_same_new_prefix_compute_it_once(
    settings: dict[str, Any], tails: list[int]
) -> None:
    engine = Engine(config(**settings | {"prefill_batch_size": 8, "prefill_chunk_tokens": 4000}))
    prompts = [[*SHARED[:400], *[n] * tail] for n, tail in enumerate(tails)]
    clients = [engine.submit(request(f"{n}", prompt)) for n, prompt in enumerate(prompts)]
    engine.finish(*clients)
    spent = 400 + sum(tails)
    assert engine.computed <= spent + len(tails) * (PROMPT_TAIL_TOKENS + BLOCK)


def test_when_the_sequence_ahead_is_aborted_the_next_one_computes_the_prefix(
    settings: dict[str, Any],
) -> None:
    engine = Engine(config(**settings))
    engine.submit(request("first", SHARED[:400]))
    others = [engine.submit(request(name, SHARED[:400])) for name in ("second", "third")]
    engine.run_turns(3)
    engine.scheduler.abort("first")
    engine.finish(*others)
    assert engine.computed < 400 + 64 + 2 * (PROMPT_TAIL_TOKENS + BLOCK)


def test_a_long_prompt_leaves_a_few_inner_snapshots(settings: dict[str, Any]) -> None:
    long = [position * position % 23 for position in range(5000)]
    settings |= {"context_length": 6000, "prefill_chunk_tokens": 512, "block_size": 64}
    engine = Engine(config(**settings))
    engine.serve(request("a", long))
    assert 2 <= engine.scheduler.stats().kept_states - 1 <= MAX_INNER_SNAPSHOTS
    other = engine.serve(request("b", [*long[:4500], *[1] * 50]))
    assert 4500 - other.cached[0] <= 2048 + 512


def test_a_preempted_sequence_goes_on_from_its_newest_snapshot(hybrid: dict[str, Any]) -> None:
    engine = Engine(config(**hybrid | {"completion_batch_size": 1}))
    background = wire.BACKGROUND_PRIORITY
    long = engine.submit(request("a", SHARED[:20], max_tokens=90, priority=background))
    engine.run_until(lambda: len(long.tokens) > 40)
    engine.finish(long, engine.submit(request("b", SHARED[100:120])))
    assert engine.scheduler.stats().preemptions_total == 1
    assert max(part.position for plan in engine.plans for part in plan.state_restores) >= 56


@pytest.mark.parametrize("limit", [1, 3])
def test_there_are_at_most_max_snapshots_and_the_latest_stay(
    settings: dict[str, Any], limit: int
) -> None:
    engine = Engine(config(**settings | {"max_snapshots": limit}))
    for number in range(6):
        engine.serve(request(f"{number}", [number] * 100, max_tokens=20))
        assert engine.scheduler.stats().kept_states == min(limit, 2 * number + 2)
    last = engine.serve(request("again", [*[5] * 100, 7]))
    assert last.cached[0] > 0 or limit == 1
    assert engine.serve(request("first", [0] * 100)).cached[0] == 0


def test_without_the_blocks_of_its_prefix_a_snapshot_is_not_used(hybrid: dict[str, Any]) -> None:
    engine = Engine(config(**hybrid))
    engine.serve(request("a", SHARED[:301]))
    memory = engine.scheduler.memory
    for _ in range(5):  # the tail of the chain is evicted first
        memory.pages.pop_oldest()
    engine.check()
    assert engine.serve(request("b", SHARED[:301])).cached[0] == 0


def test_an_abort_during_decode_leaves_no_private_snapshot(settings: dict[str, Any]) -> None:
    for turns in range(1, 24):
        engine = Engine(config(**settings))
        engine.submit(request("a", SHARED[:30], max_tokens=90))
        engine.run_turns(turns)
        engine.schedule()  # with look-ahead the token before the last one is not known now
        engine.scheduler.abort("a")
        engine.check()
        engine.finish()


def test_snapshots_are_evicted_before_any_sequence_is_preempted(settings: dict[str, Any]) -> None:
    engine = Engine(config(**settings | {"blocks": 120, "max_snapshots": 100}))
    for number in range(30):
        engine.serve(request(f"{number}", [number % 20, *SHARED[:60]], max_tokens=20))
    assert not engine.scheduler.stats().preemptions_total
    assert engine.scheduler.stats().unevictable_bytes == 0


def test_a_few_shared_tokens_are_computed_instead_of_waited_for(settings: dict[str, Any]) -> None:
    engine = Engine(config(**settings | {"prefill_chunk_tokens": None}))
    short = WORTHWHILE_TOKENS // 2
    for number in range(2):
        engine.submit(request(f"{number}", [*SHARED[:short], *[number] * 100]))
    engine.run()
    starts = [chunk.start for plan in engine.plans for chunk in plan.chunks]
    assert starts.count(0) == 2


def test_a_private_snapshot_is_not_found_until_it_is_published() -> None:
    pool = SnapshotPool(3)
    name = b"n" * 16
    one, two = pool.add_private(), pool.add_private()
    assert pool.longest_prefix([name], 0, 1) == 0 and not pool.published_hashes()
    pool.unpin(one)
    assert pool.publish(one, name) and pool.num_evictable == 1
    assert not pool.publish(two, name)
    assert pool.longest_prefix([b"m" * 16, name, b"o" * 16], 0, 3) == 2
    assert pool.take_changes() == ([name], [])
    assert pool.pop_oldest() is one and not pool.holds(one) and pool.holds(two)
    assert not list(pool.faults())


def test_a_dropped_snapshot_is_not_released_twice() -> None:
    memory = Memory(config(**RECURRENT["hybrid"]))
    seq = sequence([1], BLOCK)
    steps = [InFlightStep(0), InFlightStep(1)]
    for step in steps:
        snapshot = memory.add_snapshot(None)
        assert snapshot is not None
        step.saved[seq] = [snapshot]
        memory.drop_snapshot(snapshot)
    discard_failed({seq}, steps[0], steps[1], memory)
    assert (memory.ledger.used_bytes, memory.withdrawn_bytes, steps[1].invalid) == (0, 0, [])
