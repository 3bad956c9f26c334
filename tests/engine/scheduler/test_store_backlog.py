"""Pages that are written through go to the kvstore as it has room, and again if they are lost."""

from __future__ import annotations

import pytest

from engine.plan import StoreRoom
from engine.scheduler import store_backlog
from tests.engine.scheduler.harness import BLOCK_BYTES, Engine, config, request

PROMPT = list(range(1, 130))
PAGES = 9  # of 16 tokens in the prompt and the reply: the last one is not full


def engine_with(files: int) -> Engine:
    """Return an engine whose kvstore takes so many files at a time."""
    engine = Engine(
        config(
            blocks=300,
            store_enabled=True,
            store_policy="write_through",
            prefill_chunk_tokens=100,
        )
    )
    engine.store_room = StoreRoom(files, 2**30)
    return engine


@pytest.mark.parametrize(
    ("room", "most"),
    [(StoreRoom(3, 2**30), 3), (StoreRoom(300, 8 * BLOCK_BYTES + 1), 2)],
    ids=["files", "bytes"],
)
def test_all_full_pages_are_sent_but_no_more_at_once_than_there_is_room_for(
    room: StoreRoom, most: int
) -> None:
    engine = engine_with(300)
    engine.store_room = room
    engine.serve(request("a", PROMPT))
    assert engine.cached.issuperset(engine.stored) and len(engine.stored) == PAGES
    assert max(len(plan.exports) for plan in engine.plans) == most


def test_few_pages_that_are_evicted_together_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a step is over, what is exported of them is in no ledger."""
    monkeypatch.setattr(store_backlog, "STORE_LIMIT", StoreRoom(3, 2**30))
    engine = Engine(config(blocks=30, prefill_chunk_tokens=100, store_enabled=True))
    engine.serve(request("a", PROMPT[:100]))
    engine.serve(request("b", [19, *PROMPT[:100]]))
    assert max(len(plan.exports_first) for plan in engine.plans) == 3


def test_a_kvstore_without_room_holds_nothing_up_and_gets_the_pages_later() -> None:
    engine = engine_with(0)
    engine.serve(request("a", PROMPT))
    assert not engine.stored and engine.scheduler.idle
    assert engine.scheduler.num_unstored == PAGES
    engine.store_room = None
    engine.run()
    assert len(engine.stored) == PAGES and not engine.scheduler.num_unstored


def test_what_did_not_arrive_is_sent_again_once() -> None:
    engine = engine_with(300)
    engine.serve(request("a", PROMPT))
    lost = sorted(engine.stored)[:5]
    for block_hash in lost:
        del engine.stored[block_hash]
        engine.scheduler.on_not_stored(block_hash, is_snapshot=False)
    engine.scheduler.on_not_stored(b"of no block here", is_snapshot=False)
    plans = len(engine.plans)
    engine.run()
    assert len(engine.stored) == PAGES
    assert sum(len(plan.exports) for plan in engine.plans[plans:]) == len(lost)


def test_pages_that_leave_memory_before_there_was_room_are_sent_then() -> None:
    engine = Engine(config(blocks=48, store_enabled=True, store_policy="write_through"))
    engine.store_room = StoreRoom(0, 0)
    for number in range(4):
        engine.serve(request(f"{number}", [number] * 60))
    gone = [export for plan in engine.plans for export in plan.exports_first]
    assert gone and len(engine.stored) == len(gone)


@pytest.mark.parametrize("is_late", [False, True], ids=["waiting", "exporting"])
def test_a_cleared_cache_is_not_sent(is_late: bool) -> None:
    engine = engine_with(0)
    engine.serve(request("a", PROMPT))
    if is_late:
        engine.store_room = None
        plan = engine.schedule()
        assert plan is not None and plan.exports
    engine.scheduler.clear_cache()
    engine.store_room = None
    engine.run()
    assert not engine.stored and not engine.scheduler.num_unstored


def test_what_a_plan_in_flight_evicts_is_not_sent_once_the_cache_is_cleared() -> None:
    settings = config(blocks=40, context_length=120, store_enabled=True, look_ahead=True)
    engine = Engine(settings)
    engine.serve(request("a", PROMPT[:60], max_tokens=1))
    old = engine.cached
    engine.submit(request("b", [0, *PROMPT[:109]]))
    engine.run_until(lambda: engine.scheduler.memory.backlog.num_exported)
    engine.scheduler.clear_cache()
    engine.run()
    assert old and old.isdisjoint(engine.stored)
