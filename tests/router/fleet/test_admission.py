"""Limits on requests, the order of the queue, and the placement of sequences."""

from __future__ import annotations

import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.engines.engine import Engine
from router.fleet.engines.prefix_index import PrefixIndex
from router.fleet.queue.fair_queue import AGE_TURN_EVERY, FairQueue
from router.fleet.queue.model_queue import DepartureRate
from router.fleet.queue.placement import choose_engine, prompt_blocks
from router.fleet.sequences.remote_sequence import RemoteSequence
from router.fleet.tenants.tenant import Tenant
from shared.hashing import block_hashes
from shared.wire import CacheEvents, Submit
from tests.router.conftest import Server, StartServer, error_of, eventually, ok
from tests.router.scripted_engine import make_hello, make_refusal, make_submit


def sequence(name: str, key: str = "", **fields: Any) -> RemoteSequence:
    submit = make_submit(name, **fields)
    blocks = prompt_blocks([engine_with(0)] * 2, submit.token_ids, submit.cache_salt)
    return RemoteSequence(submit, Tenant(name=key), lambda: None, blocks)


def queue_of(*sequences: RemoteSequence) -> FairQueue:
    queue = FairQueue()
    for one in sequences:
        queue.push(one)
    return queue


def sequences(count: int, name: str, key: str = "", **fields: Any) -> list[RemoteSequence]:
    return [sequence(f"{name}{index}", key, **fields) for index in range(count)]


def names(queue: FairQueue, running: Counter[str]) -> list[str]:
    found = []
    while (next_one := queue.pop(running)) is not None:
        running[next_one.key] += 1
        found.append(next_one.request_id)
    return found


def test_the_queue_goes_by_priority_then_by_fairness_then_by_age() -> None:
    waiting = [*sequences(4, "greedy", "greedy"), *sequences(2, "modest", "modest")]
    queue = queue_of(*waiting, sequence("urgent", "greedy", priority=5))
    order = "urgent modest0 greedy0 modest1 greedy1 greedy2 greedy3"
    assert names(queue, Counter()) == order.split()


def test_a_requeued_sequence_keeps_its_age_and_a_discarded_one_is_skipped() -> None:
    waiting = sequences(4, "f")
    queue = queue_of(*waiting)
    first = queue.pop(Counter())
    assert first is waiting[0]
    queue.discard(waiting[1])
    queue.push(first)
    assert len(queue) == 3
    assert names(queue, Counter()) == ["f0", "f2", "f3"]


def test_sequences_that_no_longer_wait_are_neither_kept_nor_counted() -> None:
    """A client may send a large request and close the connection, again and again."""
    queue = FairQueue()
    queue.push(oldest := sequence("oldest"))
    gone = []
    for index in range(100):
        queue.push(one := sequence(f"gone{index}"))
        gone.append(weakref.ref(one))
        queue.discard(one)
        del one
    assert not any(ref() for ref in gone)
    assert queue.num_ahead("", 0, Counter()) == len(queue) == 1
    assert queue.pop(Counter()) is oldest and queue.pop(Counter()) is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    before=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 3)), max_size=30),
    own=st.integers(0, 3),
    arriving=st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 9)), min_size=1, max_size=40),
    leave=st.booleans(),
)
def test_every_waiting_sequence_is_placed_eventually(
    before: list[tuple[int, int]], own: int, arriving: list[tuple[int, int]], leave: bool
) -> None:
    """One has the lowest priority and the busiest key, and as many arrive as leave."""
    running, poor = Counter({"poor": 1000}), sequence("poor", "poor", priority=-2)
    others = [
        sequence(f"b{i}", f"key{key}", priority=priority)
        for i, (key, priority) in enumerate(before)
    ]
    queue = queue_of(*others, *sequences(own, "own", "poor", priority=-2), poor)
    most_keys = departed = 0
    while True:
        key, priority = arriving[departed % len(arriving)]
        newcomer = sequence(f"n{departed}", f"key{key}", priority=priority)
        queue.push(newcomer)
        if leave and departed % 3 == 0:
            queue.discard(newcomer)
        most_keys = max(most_keys, len({one.key for one in queue}))
        if queue.pop(running) is poor:
            break
        departed += 1
        assert departed < AGE_TURN_EVERY * most_keys * (own + 1)
    assert all(one.request_id != "poor" for one in queue)


def test_priority_decides_between_the_turns_of_age() -> None:
    queue = queue_of(*sequences(40, "low"), *sequences(40, "high", priority=1))
    first = names(queue, Counter())[:40]
    assert first[AGE_TURN_EVERY - 1 :: AGE_TURN_EVERY] == [f"low{index}" for index in range(5)]
    assert sum(name.startswith("high") for name in first) == 35


def engine_with(sequences: int, *events: CacheEvents) -> Engine:
    engine = Engine(b"peer", make_hello("engine"), "engine", stall_limit_s=1.0)
    engine.request_ids.update(dict.fromkeys(map(str, range(sequences))))
    for each in events:
        engine.prefix_index.update(each)
    return engine


PROMPT = list(range(64))


def test_a_sequence_goes_to_the_engine_with_its_prefix_unless_that_is_clearly_busier() -> None:
    cached = CacheEvents(number=1, added=block_hashes(b"n" * 16, PROMPT, 16)[:2], removed=[])
    one = sequence("x", token_ids=PROMPT)
    assert choose_engine([engine_with(0), busy := engine_with(3, cached)], one) is busy
    assert choose_engine([idle := engine_with(0), engine_with(9, cached)], one) is idle


def test_an_engine_is_chosen_by_hashes_that_were_made_before() -> None:
    """Those of a long prompt take longer than the event loop may stand still."""
    one = sequence("x", token_ids=PROMPT)
    one.prompt_blocks = {(b"n" * 16, 16): [b"made up"]}
    cached = engine_with(3, CacheEvents(number=1, added=[b"made up"], removed=[]))
    assert choose_engine([engine_with(0), cached], one) is cached
    assert prompt_blocks([cached], PROMPT, "") == {}


def test_a_salt_for_each_key_keeps_their_prefixes_apart(start_server: StartServer) -> None:
    server = start_server("--api-key=one", "--api-key=two", "--cache-salt-per-key")
    engine = server.join("hi")
    for key in ("one", "two"):
        server.client.headers["x-api-key"] = key
        assert server.chat("x", cache_salt="s").status_code == 200
    salts = [submit.cache_salt for submit in engine.got(Submit)]
    assert len(set(salts)) == 2 and all(salt.endswith("/s") for salt in salts)


def test_a_placed_prefix_is_assumed_to_be_cached() -> None:
    engines = [engine_with(1), engine_with(0)]
    first = choose_engine(engines, sequence("a", token_ids=PROMPT))
    first.request_ids.update(dict.fromkeys("abc"))
    assert choose_engine(engines, sequence("b", token_ids=[*PROMPT, 5])) is first
    other = sequence("c", token_ids=PROMPT, cache_salt="s")
    assert choose_engine(engines, other) is not first


def test_a_gap_in_cache_events_resets_the_index() -> None:
    index = PrefixIndex()
    index.update(CacheEvents(number=1, added=[b"a", b"b"], removed=[]))
    index.update(CacheEvents(number=2, added=[b"c"], removed=[b"b"]))
    assert [index.num_cached_blocks([block]) for block in (b"a", b"b", b"c")] == [1, 0, 1]
    index.update(CacheEvents(number=4, added=[b"d"], removed=[]))
    assert [index.num_cached_blocks([block]) for block in (b"a", b"d")] == [0, 1]
    # Of recurrent state only the end is reported.
    assert index.num_cached_blocks([b"x", b"d", b"y"]) == 2
    enough = [index.num_cached_blocks([b"x", b"d", b"y"], at_least=most) for most in (2, 3, 4)]
    assert enough == [2, 0, 0]


def test_assumed_blocks_are_bounded() -> None:
    index = PrefixIndex(assumed_limit=2)
    index.assume([b"a", b"b", b"c"])
    assert [index.num_cached_blocks([block]) for block in (b"a", b"b", b"c")] == [0, 1, 1]


def test_the_number_ahead_counts_what_goes_first() -> None:
    urgent = sequence("urgent", "other", priority=1)
    queue = queue_of(*sequences(5, "greedy", "greedy"), urgent)
    running = Counter({"greedy": 2})
    assert queue.num_ahead("greedy", 0, running) == 6
    assert queue.num_ahead("new", 0, running) == 1
    assert queue.num_ahead("new", 2, running) == 0
    assert queue.num_ahead("new", 0, Counter()) == 2


def test_a_request_that_would_wait_too_long_is_refused_at_once(start_server: StartServer) -> None:
    server = start_server("--first-token-timeout-s=3", "--max-concurrent-requests=0")
    server.join("hi", step_s=0.04, max_sequences=1)
    with ThreadPoolExecutor(64) as pool:
        answers = [pool.submit(server.chat, "x") for _ in range(14)]
        eventually(lambda: sum(answer.done() for answer in answers) >= 10, 30)
        more = [pool.submit(server.chat, "x") for _ in range(50)]
        eventually(lambda: any(answer.done() for answer in more))
        refused = next(answer.result() for answer in more if answer.done())
        assert error_of(refused, 429)["code"] == "queue_too_long"
        assert int(refused.headers["retry-after"]) >= 1


def test_the_wait_is_estimated_from_the_rate_of_departures() -> None:
    times = iter([0.0, 2.0, 4.0, 4.0, 4.0, 40.0, 40.0])
    rate = DepartureRate(clock=lambda: next(times))
    assert rate.wait_s(10) > 0
    for _ in range(3):
        rate.record()
    assert rate.wait_s(0) == pytest.approx(2)
    assert rate.wait_s(9) == pytest.approx(20)
    assert rate.wait_s(0) == pytest.approx(20)
    assert rate.wait_s(1000) == 120


@pytest.mark.parametrize(
    ("flags", "most", "named"),
    [
        (("--max-queue-size=2", "--max-concurrent-requests=0"), 3, {"code": "queue_full"}),
        (("--max-concurrent-requests=2",), 2, {"type": "rate_limit_error"}),
    ],
)
def test_too_many_requests_are_a_429_with_retry_after(
    start_server: StartServer, flags: tuple[str, ...], most: int, named: dict[str, str]
) -> None:
    server = start_server(*flags)
    engine = server.join("hi", hold_tokens_after=0, max_sequences=1)
    answers = [server.begin("x") for _ in range(most)]
    eventually(lambda: f'queued_requests{{model="tiny"}} {most - 1}.0' in server.metrics)
    for stream in (False, True):
        refused = server.chat("x", stream=stream)
        assert named.items() <= error_of(refused, 429).items()
        assert int(refused.headers["retry-after"]) >= 1
    engine.behaviour.hold_tokens_after = None
    assert {answer.result(60).status_code for answer in answers} == {200}
    ok(server.chat("x"))


def test_a_full_engine_is_tried_again(server: Server) -> None:
    engine = server.start_engine("hi")
    engine.behaviour.refuse = lambda submit: (
        make_refusal(submit, reason="full", message="full") if len(engine.got(Submit)) < 3 else None
    )
    server.wait_ready()
    assert server.chat("x").status_code == 200
    assert [submit.attempt for submit in engine.got(Submit)] == [0, 1, 2]
