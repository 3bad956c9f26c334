"""Too little memory, and steps that raise: sequences wait or restart, and end right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.scheduler.sequences.sequence import HOLDING_SLOT
from engine.scheduler.timing.backoff import STEPS_TO_DOUBLE, ConcurrencyBackoff
from tests.engine.conftest import Wrap
from tests.engine.scheduler.harness import BLOCK_BYTES, SHARED, Engine, config, request


@pytest.fixture
def unreserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are admitted without room for the answers of those that run."""
    monkeypatch.setattr("engine.scheduler.memory.RESERVED_TOKENS", 0)


@pytest.mark.usefixtures("unreserved")
def test_the_youngest_of_the_lowest_priority_is_preempted_and_resumes_exactly(
    look_ahead: bool,
) -> None:
    engine = Engine(config(blocks=36, look_ahead=look_ahead, max_batch_size=8))
    growing = engine.submit(request("growing", SHARED[30:50], max_tokens=100))
    others = [
        engine.submit(request(f"r{n}", [n, *SHARED[:7]], max_tokens=28, priority=n == 4))
        for n in range(5)
    ]
    preempted = set()
    while engine.turn():
        preempted |= {
            seq.request.request_id
            for seq in engine.scheduler.sequences.live.values()
            if seq.status.name == "PREEMPTED"
        }
    assert {"r2", "r3"} <= preempted <= {"r0", "r1", "r2", "r3"}, "the others matter more"
    engine.finish(growing, *others)
    for client in (growing, *others):
        assert client.usage.cached_ram_tokens == 0, "its own blocks are no cache hit"


@pytest.mark.usefixtures("unreserved")
def test_a_preempted_sequence_fetches_evicted_blocks_from_the_kvstore() -> None:
    engine = Engine(config(blocks=36, max_batch_size=8, store_enabled=True))
    clients = [engine.submit(request("growing", SHARED[30:50], max_tokens=100))]
    clients += [engine.submit(request(f"r{n}", [n] * 16, max_tokens=24)) for n in range(5)]
    engine.finish(*clients)
    stats = engine.scheduler.stats()
    assert stats.preemptions_total > 0
    assert sum(len(plan.inserts) for plan in engine.plans) > 0


@pytest.mark.usefixtures("unreserved")
def test_a_sequence_is_preempted_in_the_plan_that_inserts_its_pages(wrap: Wrap) -> None:
    """They are free in the next plan, for which the others wait. It then goes on with those that
    are left."""
    before = Engine(config(store_enabled=True, store_policy="write_through"))
    before.serve(request("a", SHARED[:97]))
    found: list[list[tuple[str, bool]]] = []
    for turns in range(24, 30):  # in one of them both streams need a page just then
        engine = Engine(config(blocks=44, look_ahead=True, store_enabled=True))
        engine.stored = dict(before.stored)
        streams = [engine.submit(request(f"{n}", [n] * 6, max_tokens=40)) for n in range(2)]
        engine.run_turns(turns)
        preempted: dict[int, list[tuple[str, bool]]] = {}

        @wrap(engine.scheduler.planner, "preempt")
        def noted(preempt: Callable[..., Any], seq: Any, builder: Any) -> None:
            is_inserted = any(page in seq.pages for page, _, _ in builder.inserted)
            names = preempted.setdefault(builder.step.number, [])  # noqa: B023
            names.append((seq.request.request_id, is_inserted))
            preempt(seq, builder)

        long = engine.submit(request("long", SHARED[:97], max_tokens=3))
        engine.finish(long, *streams)
        found += [names for names in preempted.values() if any(inserted for _, inserted in names)]
    assert found == [[("long", True)]]


def test_a_prompt_that_finds_no_room_is_looked_up_seldom(wrap: Wrap) -> None:
    engine = Engine(config(blocks=48, max_batch_size=8))
    running = [engine.submit(request(f"r{n}", [n] * 8, max_tokens=60)) for n in range(2)]
    engine.run_turns(8)
    looked_up = []

    @wrap(engine.scheduler.memory.pages, "match")
    def counted(match: Callable[..., Any], *of: Any) -> Any:
        looked_up.append(len(engine.plans))
        return match(*of)

    waiting = engine.submit(request("waiting", SHARED[:90], max_tokens=4))
    engine.finish(*running, waiting)
    waited = max(looked_up) - min(looked_up)
    assert waited > 40 and len(looked_up) < waited / 3


def test_a_step_whose_request_was_cancelled_may_fail() -> None:
    engine = Engine(config(look_ahead=True))
    engine.submit(request("a", SHARED[:20], max_tokens=50))
    engine.run_turns(4)
    assert engine.schedule() is not None
    engine.scheduler.abort("a", 1)
    assert engine.scheduler.recover("it failed", out_of_memory=False), "another step may succeed"
    assert not engine.scheduler.recover("it failed", out_of_memory=False), "there is none"


@pytest.mark.parametrize("policy", ["evict_only", "write_through"])
@pytest.mark.parametrize("chunks_before", [0, 2, 4])
def test_sequences_that_share_pages_of_a_failed_chunk_restart(
    chunks_before: int, policy: str
) -> None:
    """With look-ahead the next plan lets them share pages before it is known that the chunk
    failed."""
    fields = {"blocks": 200, "look_ahead": True, "prefill_batch_size": 4}
    engine = Engine(config(store_enabled=True, store_policy=policy, **fields))
    failing = engine.submit(request("failing", SHARED))
    others = [  # of low priority, so that none goes first
        engine.submit(request(f"{length}-{n}", [*SHARED[:length], n, n], priority=-1))
        for length in (16, 90)
        for n in range(2)
    ]
    engine.run_until(lambda: len(engine.executor.chunk_tokens) >= chunks_before)
    engine.executor.fail_next_chunk = True
    engine.finish(*others)
    assert failing.error
    engine.serve(request("again", SHARED))


def test_a_sequence_that_makes_steps_raise_alone_ends_with_an_error_and_others_finish() -> None:
    engine = Engine(config(blocks=400, max_batch_size=8))
    bad = engine.submit(request("bad", SHARED[50:60], max_tokens=40))
    others = [engine.submit(request(f"r{n}", SHARED[n : 9 + n], max_tokens=20)) for n in range(6)]
    for _ in range(5000):
        decoding = [
            seq.request.request_id for seq in engine.scheduler.sequences.ordered(*HOLDING_SLOT)
        ]
        engine.executor.fail_next_step = "bad" in decoding and bad.end is None
        if not engine.turn():
            break
    assert bad.error == "the step raised"
    engine.finish(*others)


def test_after_running_out_of_memory_less_of_it_is_used() -> None:
    engine = Engine(config(blocks=200, context_length=60))
    first = [engine.submit(request(f"r{n}", [n] * 30, max_tokens=20)) for n in range(8)]
    engine.run_until(lambda: engine.scheduler.stats().running == 8)
    held = engine.scheduler.memory.ledger.used_bytes
    engine.executor.fail_next_step = True
    engine.finish(*first)
    limit = engine.scheduler.stats().limit_bytes
    assert 100 * BLOCK_BYTES <= 0.9 * held <= limit < held
    engine.serve(request("largest", SHARED[:40], max_tokens=20))


def test_after_successful_steps_as_many_sequences_run_as_before() -> None:
    backoff = ConcurrencyBackoff(8)
    backoff.step_failed(8)
    assert backoff.limit == 4
    backoff.step_failed(1)
    assert backoff.limit == 1
    limits = set()
    for _ in range(3 * STEPS_TO_DOUBLE):
        backoff.step_succeeded()
        limits.add(backoff.limit)
    assert limits == {1, 2, 4, 8}
    for _ in range(STEPS_TO_DOUBLE):
        backoff.step_succeeded()
    assert backoff.limit == 8


def test_a_low_priority_is_overtaken_by_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduler.sequences.sequence.ARRIVALS_PER_PRIORITY", 10)
    engine = Engine(config(blocks=200, max_batch_size=1, completion_batch_size=4))
    low = engine.submit(request("low", SHARED[:5], max_tokens=3))
    ended_before = 0
    for number in range(60):
        engine.submit(request(f"high{number}", SHARED[number : number + 5], priority=1))
        while engine.scheduler.live()[3:]:
            engine.turn()
        if low.end is not None:
            break
        ended_before = sum(client.end is not None for client in engine.clients.values())
    engine.assert_right(low)
    assert 2 <= ended_before <= 10
    first, second = (engine.submit(request(f"p{n}", [1], priority=n)) for n in (2**31 - 1, 16))
    engine.finish(first, second)
