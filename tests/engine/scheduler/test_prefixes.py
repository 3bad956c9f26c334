"""Prefixes are computed once: they come from RAM, from the kvstore, or from another sequence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.plan import Exported
from engine.scheduler import intake
from engine.scheduler.config import StorePolicy
from engine.scheduler.timing.chunks import ChunkPolicy
from shared.hashing import block_hashes
from tests.engine.scheduler.harness import BLOCK_BYTES, SHARED, Engine, config, request


def with_stored(length: int, **changes: Any) -> Engine:
    """Return an engine whose kvstore has the first ``length`` tokens of `SHARED`."""
    before = Engine(config(store_enabled=True, store_policy="write_through"))
    before.serve(request("a", SHARED[:length]))
    engine = Engine(config(store_enabled=True, **changes))
    engine.stored = before.stored
    return engine


def ends_in_decodes(engine: Engine) -> list[list[int]]:
    """Return how many known tokens the decodes of each plan compute, if any do."""
    ends = [[len(decode.before) for decode in plan.decodes] for plan in engine.plans]
    return [each for each in ends if any(each)]


@pytest.mark.parametrize(("length", "reused"), [(7, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_full_blocks_before_the_last_token_are_reused(length: int, reused: int) -> None:
    engine = Engine(config())
    engine.serve(request("a", SHARED[:length]))
    assert engine.serve(request("b", SHARED[:length])).cached == (reused, 0)


def test_blocks_are_shared_only_under_the_same_salt() -> None:
    engine = Engine(config())
    engine.serve(request("a", SHARED[:40]))
    assert engine.serve(request("b", SHARED[:40], cache_salt="pepper")).cached == (0, 0)
    assert engine.serve(request("c", SHARED[:40], cache_salt="pepper")).cached == (36, 0)


def test_sequences_of_a_model_without_a_prefix_cache_share_nothing() -> None:
    engine = Engine(config(prefix_cache=False, store_enabled=True))
    engine.serve(request("a", SHARED[:40]))
    assert engine.serve(request("b", SHARED[:40])).cached == (0, 0)
    assert not engine.fetches and not engine.stored


@pytest.mark.parametrize("stop", [False, True])
def test_the_next_turn_computes_only_what_is_new(look_ahead: bool, stop: bool) -> None:
    engine = Engine(config(look_ahead=look_ahead, blocks=300))
    history, known = SHARED[:5], 3
    for turn in range(10):
        stops = [3, 4] if stop else []
        message = request(f"t{turn}", history, max_tokens=11, stop_token_ids=stops)
        client = engine.serve(message)
        # Of the turn before all full blocks were computed, without its very last token.
        assert sum(client.cached) >= known - 3
        known = len(history) + len(client.tokens) - 1
        history = [*history, *client.tokens, turn, 1]


@pytest.mark.parametrize("store", [False, True])
def test_eight_arrivals_with_the_same_new_prefix_compute_it_once(
    look_ahead: bool, store: bool
) -> None:
    fields = {"look_ahead": look_ahead, "store_enabled": store}
    engine = Engine(config(blocks=600, prefill_batch_size=4, **fields))
    clients = [engine.submit(request(f"r{n}", [*SHARED, n, n + 1, n + 2])) for n in range(8)]
    engine.finish(*clients)
    assert engine.computed == 100 + 8 * 2
    assert max(len(plan.chunks) for plan in engine.plans) == 7  # all ends in one pass


def test_arrivals_compute_nothing_that_a_running_sequence_has() -> None:
    """Also what is in its last page, which it writes, and the part of a block."""
    engine = Engine(config(blocks=600, block_size=16, completion_batch_size=9))
    prompts = [[*SHARED[:90], n, n + 1, n + 2] for n in range(8)]
    clients = [engine.submit(request(f"r{n}", each)) for n, each in enumerate(prompts)]
    same = engine.submit(request("same", prompts[0]))
    engine.finish(*clients, same)
    assert engine.computed == 92 + 7 * 2
    assert same.cached == (92, 0)


def test_decodes_compute_the_ends_of_prompts() -> None:
    """All at once, with the first one's next token, and without a pass of their own."""
    engine = Engine(config(blocks=600, decodes_ends=True, max_batch_size=8))
    engine.serve(request("before", [7] * 160, max_tokens=1))  # tells how fast this device is
    engine.plans.clear()
    prefilled = engine.scheduler.stats().prefill_tokens_total
    prompts = [[*SHARED, n, n + 1, n + 2] for n in range(4)]
    clients = [engine.submit(request(f"r{n}", each)) for n, each in enumerate(prompts)]
    engine.finish(*clients)
    assert ends_in_decodes(engine) == [[102 % 16], [0, *3 * [2]]]
    assert [len(plan.chunks) for plan in engine.plans if plan.chunks] == 102 // 16 * [1]
    assert engine.scheduler.stats().prefill_tokens_total - prefilled == 102 + 3 * 2


def test_ends_that_take_longer_than_one_decode_may_share_passes() -> None:
    """If each decode computed a few of them, all would wait longer."""
    fields: dict[str, Any] = {"prefill_chunk_tokens": None, "layers": 12, "max_batch_size": 8}
    engine = Engine(config(blocks=600, decodes_ends=True, **fields))
    engine.serve(request("before", [7] * 160, max_tokens=1))
    engine.plans.clear()
    prompts = [[*SHARED, *range(n, n + 28)] for n in range(8)]
    engine.finish(*(engine.submit(request(f"r{n}", each)) for n, each in enumerate(prompts)))
    assert [len(plan.chunks) for plan in engine.plans if plan.chunks] == [1, 4, 3]
    assert not ends_in_decodes(engine)


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [(SHARED[:70], {"prompt_logprobs": 0}), ([*SHARED[:60], *[1] * 34], {})],
    ids=["log-probabilities", "too long"],
)
def test_other_ends_are_computed_by_chunks(prompt: list[int], changes: dict[str, Any]) -> None:
    engine = Engine(config(blocks=600, decodes_ends=True, prefill_chunk_tokens=64))
    engine.serve(request("first", SHARED[:60]))
    chunks = len(engine.chunks)
    engine.serve(request("second", prompt, **changes))
    assert len(engine.chunks) > chunks and not ends_in_decodes(engine)


def test_nothing_is_copied_from_a_sequence_whose_end_is_computed_in_the_same_plan() -> None:
    engine = Engine(config(blocks=600, block_size=16, decodes_ends=True))
    engine.serve(request("first", SHARED[:96]))
    same = [*SHARED[:96], *range(4)]
    clients = [engine.submit(request(name, same)) for name in ("second", "third")]
    engine.finish(*clients)
    assert [3, 3] in ends_in_decodes(engine)


def test_a_fixed_length_of_chunks_limits_the_ends_too() -> None:
    engine = Engine(config(decodes_ends=True, prefill_chunk_tokens=8))
    engine.serve(request("first", SHARED[:20]))
    assert [len(chunk.token_ids) for chunk in engine.chunks] == [8, 8]
    assert ends_in_decodes(engine) == [[3]]


def test_with_log_probabilities_or_another_salt_no_positions_are_copied() -> None:
    engine = Engine(config(blocks=600, block_size=16))
    first = engine.submit(request("first", SHARED[:60], max_tokens=90))
    engine.run_turns(9)
    scored = engine.submit(request("scored", SHARED[:60], prompt_logprobs=1))
    salted = engine.submit(request("salted", SHARED[:60], cache_salt="pepper"))
    engine.finish(first, scored, salted)
    assert not any(plan.copies for plan in engine.plans)


def test_when_the_sequence_ahead_is_aborted_the_next_one_computes_the_prefix() -> None:
    engine = Engine(config(blocks=300))
    engine.submit(request("first", SHARED))
    others = [engine.submit(request(name, SHARED)) for name in ("second", "third")]
    engine.run_turns(2)
    engine.scheduler.abort("first")
    engine.finish(*others)
    assert engine.computed == 96 + 2 * 3, "only the last, unfinished block is computed twice"


def test_a_request_that_joins_midway_restores_what_is_cached_and_then_follows() -> None:
    engine = Engine(config(blocks=300))
    engine.submit(request("first", SHARED))
    engine.run_turns(3)
    late = engine.serve(request("late", [*SHARED[:90], 1, 2, 3]))
    assert late.cached == (88, 0)
    assert engine.computed == 99 + 4


def test_recently_used_blocks_stay_the_longest_and_heads_outlive_their_tails() -> None:
    engine = Engine(config(blocks=64))
    engine.serve(request("old", SHARED[:80]))
    for number in range(3):
        engine.serve(request(f"new{number}", [number + 1] * 30))
        engine.serve(request(f"touch{number}", SHARED[:80]))
    assert engine.serve(request("again", SHARED[:80])).cached[0] >= 60


def test_the_tail_of_a_finished_sequence_is_evicted_first() -> None:
    engine = Engine(config(blocks=24))
    engine.serve(request("a", SHARED[:60]))
    engine.serve(request("b", [1] * 60))
    before = len(engine.cached)
    ram, _ = engine.serve(request("again", SHARED[:60])).cached
    assert 0 < ram < 56, f"some of it had to go for b, with {before} blocks cached"


def test_after_a_restart_the_prefix_comes_from_the_kvstore() -> None:
    after = with_stored(50)
    client = after.serve(request("b", SHARED[:50]))
    assert client.cached == (0, 48)
    assert after.computed == 1
    assert after.serve(request("c", SHARED[:50])).cached == (48, 0)
    stats = after.scheduler.stats()
    assert (stats.cached_ram_tokens_total, stats.cached_ssd_tokens_total) == (48, 48)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_long_prefix_comes_from_the_kvstore_in_parts_while_streams_run(look_ahead: bool) -> None:
    engine = with_stored(100, max_insert_bytes=8 * BLOCK_BYTES, look_ahead=look_ahead)
    stream = engine.stream(request("stream", [7] * 9, max_tokens=40))
    before = len(engine.plans)
    long = engine.submit(request("long", SHARED))
    engine.finish(long, stream)
    inserting = [plan for plan in engine.plans[before:] if plan.inserts]
    assert [len(plan.inserts) for plan in inserting] == [2] * 3
    assert sum(bool(plan.decodes) for plan in inserting) >= 2, "the stream goes on"
    assert not any(plan.chunks for plan in inserting[:-1]), "nothing of it is computed"
    assert long.cached == (0, 96)


@pytest.mark.parametrize("policy", ["write_through", "evict_only"])
def test_a_page_that_is_not_full_is_stored_when_its_sequence_ends(policy: StorePolicy) -> None:
    """A later turn, in another process, computes only what comes after the last block."""
    engine = Engine(config(store_enabled=True, store_policy=policy, blocks=64))
    engine.serve(request("a", SHARED[:61], max_tokens=1))
    if policy == "evict_only":
        for token in (7, 8):
            engine.serve(request(f"{token}", [token] * 190, max_tokens=1))
    later = Engine(config(store_enabled=True, store_policy=policy))
    later.stored = dict(engine.stored)
    assert later.serve(request("b", SHARED, max_tokens=1)).cached == (0, 60)
    assert later.computed == len(SHARED) - 61 and not later.executor.copied


def test_two_sequences_that_continue_a_fetched_part_of_a_page_write_pages_of_their_own() -> None:
    engine = Engine(config(store_enabled=True, store_policy="write_through"))
    engine.serve(request("a", SHARED[:61], max_tokens=1))
    later = Engine(config(store_enabled=True))
    later.stored = dict(engine.stored)
    later.store_answers = False
    both = [later.submit(request(f"{n}", [*SHARED[:61], n, n, n], max_tokens=9)) for n in (1, 2)]
    later.run_turns(2)
    later.answer_store()
    later.answer_store()
    later.finish(*both)
    assert [sum(client.cached) for client in both] == [60, 60]


def test_short_sequences_and_first_pages_are_not_stored_in_part() -> None:
    """A sequence asks for parts only with a full page."""
    engine = Engine(config(store_enabled=True, store_policy="write_through"))
    engine.serve(request("a", SHARED[:13], max_tokens=1))
    assert not engine.stored


@pytest.mark.parametrize(("blocks", "resized"), [(400, 1), (96, 2)])
def test_a_fetch_changes_the_number_of_pages_once_or_twice(
    blocks: int, resized: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU copies all pages each time. In full memory what arrives takes the memory of pages
    first, and they get it back while it is inserted."""
    monkeypatch.setattr("engine.scheduler.memory.FIRST_TOKENS", 16)
    engine = with_stored(100, max_insert_bytes=4 * BLOCK_BYTES, blocks=blocks)
    for number in range(15 if resized > 1 else 1):
        engine.serve(request(f"{number}", [number] * 20))
    before = len(engine.plans)
    assert engine.serve(request("long", SHARED, max_tokens=1)).cached == (0, 96)
    fetching = engine.plans[before:]
    assert sum(bool(plan.inserts) for plan in fetching) == 6
    assert sum(bool(plan.num_pages) for plan in fetching) == resized


def test_a_fetch_into_full_memory_with_nothing_cached_changes_the_number_of_pages_in_few_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running sequences have all other pages: what is inserted takes the memory of the fetch."""
    monkeypatch.setattr("engine.scheduler.memory.FIRST_TOKENS", 16)
    engine = with_stored(100, max_insert_bytes=4 * BLOCK_BYTES, blocks=52)
    stream = engine.stream(request("stream", [7] * 81, max_tokens=14))
    before = len(engine.plans)
    long = engine.submit(request("long", SHARED, max_tokens=1))
    engine.run_until(lambda: long.tokens)
    fetching = engine.plans[before:]
    assert sum(bool(plan.inserts) for plan in fetching) == 6
    assert sum(bool(plan.num_pages) for plan in fetching) == 2
    engine.finish(stream, long)


def test_choices_of_one_prompt_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(root: bytes, token_ids: tuple[int, ...], *others: Any) -> list[bytes]:
        hashed.append(len(token_ids))
        return block_hashes(root, token_ids, *others)

    monkeypatch.setattr(intake, "block_hashes", counted)
    engine = Engine(config())
    for name in "abc":
        engine.submit(request(name, SHARED[5:]))
    engine.submit(request("d", SHARED[6:]))
    assert hashed == [len(SHARED) - 5, len(SHARED) - 6]


def test_what_was_fetched_but_is_in_memory_meanwhile_reserves_nothing() -> None:
    engine = with_stored(41, max_insert_bytes=BLOCK_BYTES, blocks=300)
    engine.store_answers = False
    clients = [engine.submit(request(f"{last}", [*SHARED, last])) for last in (1, 2)]
    engine.run_turns(3)
    engine.answer_store()
    engine.answer_store()
    while not all(client.tokens for client in clients):
        engine.turn()
        for seq, reserved in engine.scheduler.memory.fetch_reservations.items():
            assert reserved == len(seq.fetch.payloads) * engine.config.page_bytes
    engine.finish(*clients)


@pytest.mark.parametrize("how", ["abort", "raise"])
def test_what_ends_while_its_prefix_is_inserted_leaves_nothing_reserved(how: str) -> None:
    engine = with_stored(100, max_insert_bytes=BLOCK_BYTES)
    client = engine.submit(request("a", SHARED))
    engine.run_until(lambda: len(engine.plans) == 5)
    assert engine.scheduler.memory.fetch_reservations
    if how == "abort":
        engine.scheduler.abort("a")
        engine.run()
    else:
        engine.executor.fail_next_step = True
        engine.finish(client)
    assert not engine.scheduler.memory.fetch_reservations
    engine.assert_nothing_left()


def test_bytes_and_times_of_chunks_may_come_with_a_later_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from an executor whose results do not wait for chunks. The first chunk's time has that of
    new memory in it, and is no measure of others."""
    usual, late = (Engine(config(store_enabled=True, store_policy="write_through")) for _ in "ab")
    usual.serve(request("a", SHARED[:50]))
    late.submit(request("a", SHARED[:50]))
    observed: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(
        ChunkPolicy, "observe_chunks", lambda _, chunks, *seen, **more: observed.append(chunks)
    )
    exported: tuple[Exported, ...] = ()
    times: tuple[tuple[int, float], ...] = ()
    late.schedule()
    late.answer_store()
    while (plan := late.schedule()) is not None:
        result = late.results.popleft()
        fields = {"exported": exported, "chunk_times": times, "chunks_apart": bool(plan.chunks)}
        late.results.append(msgspec.structs.replace(result, **fields))
        exported, times = result.exported, ((plan.step, 0.5),) * bool(plan.chunks)
        late.apply()
    assert len(late.stored) > 2 and late.stored.keys() <= usual.stored.keys()
    assert len(usual.stored) - len(late.stored) == len(exported), "the last are on their way"
    chunks = [(chunk.start, len(chunk.token_ids)) for chunk in late.chunks]
    assert observed == [[chunk] for chunk in chunks[1:]]
    assert late.scheduler.stats().step_seconds_total > 0.5 * len(chunks)


def test_a_sequence_that_waits_for_the_kvstore_delays_no_other() -> None:
    engine = Engine(config(store_enabled=True))
    engine.store_answers = False
    slow = engine.submit(request("slow", SHARED[:50]))
    engine.assert_right(engine.answer(request("quick", SHARED[50:53])))
    assert slow.end is None and len(engine.scheduler.live()) == 1
    engine.store_answers = True
    engine.finish(slow)


def test_an_answer_to_an_abandoned_fetch_is_ignored() -> None:
    engine = Engine(config(store_enabled=True))
    engine.store_answers = False
    engine.submit(request("a", SHARED[:50]))
    engine.schedule()
    engine.scheduler.abort("a")
    engine.answer_store()
    engine.scheduler.on_fetched(99, [(b"x",)])
    assert engine.schedule() is None
    engine.assert_nothing_left()


def test_blocks_on_their_way_from_the_kvstore_are_reserved_in_the_ledger() -> None:
    engine = with_stored(50, blocks=32)
    engine.store_answers = False
    engine.submit(request("first", SHARED[:50]))
    engine.schedule()
    assert engine.scheduler.stats().used_blocks == 12
    engine.submit(request("second", [7] * 90, max_tokens=8))
    engine.schedule()
    (_, hashes, *_), (_, rest, *_) = engine.fetches
    assert (len(hashes), len(rest)) == (3, 5), "no more is asked for than there is room"
    engine.scheduler.abort("first")
    engine.scheduler.abort("second")
    engine.run()
    assert engine.scheduler.stats().used_blocks == 0


def test_a_fetch_that_nobody_waits_for_any_more_is_cancelled() -> None:
    engine = with_stored(50)
    engine.store_answers = False
    engine.submit(request("a", SHARED[:50]))
    engine.schedule()
    (*_, cancellation) = engine.fetches[0]
    assert not cancellation.is_set
    engine.scheduler.abort("a")
    assert cancellation.is_set


def test_running_sequences_take_the_room_of_blocks_fetched_for_waiting_ones() -> None:
    engine = with_stored(60, blocks=32)
    engine.store_answers = False
    fetching = engine.submit(request("fetching", SHARED[:60]))
    engine.schedule()
    assert engine.scheduler.stats().used_blocks == 16, "three pages, and a part"
    engine.assert_right(engine.answer(request("quick", [1, 2, 3], max_tokens=100)))
    assert fetching.end is None
    engine.store_answers = True
    engine.finish(fetching)
    assert fetching.cached == (0, 0), "there was no room for them, so they were computed"


def test_evicted_blocks_go_to_the_kvstore_once() -> None:
    engine = Engine(config(blocks=24, store_enabled=True))
    engine.serve(request("a", SHARED[:60]))
    assert not engine.stored
    engine.serve(request("b", [1] * 60))
    assert engine.stored
    assert engine.serve(request("c", SHARED[:60], max_tokens=1)).cached[1] > 0
    names = {name.block_id: name.hash for plan in engine.plans for name in plan.names}
    exports = [names[one.block_id] for plan in engine.plans for one in plan.exports_first]
    assert len(exports) == len(set(exports)), "what came from there is not sent again"


def test_write_through_exports_full_pages_at_once_and_not_at_eviction() -> None:
    engine = Engine(config(blocks=24, store_enabled=True, store_policy="write_through"))
    engine.serve(request("a", SHARED[:60]))
    assert len(engine.stored) == 4 and engine.cached.issuperset(engine.stored)
    engine.serve(request("b", [1] * 60))
    assert not engine.cached.issuperset(engine.stored)
    assert not any(plan.exports_first for plan in engine.plans)


def test_a_prompt_with_logprobs_is_computed_whatever_is_cached() -> None:
    engine = Engine(config(blocks=300, store_enabled=True))
    prompt = [*SHARED, *SHARED[:90]]
    engine.serve(request("a", prompt))
    already = engine.computed
    client = engine.serve(request("b", prompt, prompt_logprobs=1))
    assert client.cached == (0, 0)
    assert engine.computed - already == len(prompt) - 1 == len(client.prompt_logprobs)
    assert engine.serve(request("c", prompt)).cached[0] == 188


def test_requests_without_prompt_logprobs_share_with_one_that_has_them(look_ahead: bool) -> None:
    engine = Engine(config(blocks=300, look_ahead=look_ahead))
    clients = [
        engine.submit(request(f"{i}", SHARED, prompt_logprobs=None if i else 0)) for i in range(3)
    ]
    engine.finish(*clients)
    assert len(clients[0].prompt_logprobs) == len(SHARED) - 1
    assert engine.computed <= len(SHARED) + 2 * 4
