"""The state machine of batches: random calls, and a store that is closed at any moment."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.batches.store import (
    CANCELLABLE,
    FOLLOWERS,
    BatchState,
    BatchStore,
    NewFile,
    Result,
    StorageFailed,
    read_results,
)

VALUES: dict[str, Any] = {"key": "k", "endpoint": "/v1/completions", "input_file_id": "file-0"}
VALUES |= {"completion_window": "24h", "created_at": 1, "expires_at": 2}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    found = BatchStore(tmp_path / "batches.db")
    yield found
    found.close()


def added(store: BatchStore, name: str = "batch_0") -> int:
    return int(store.add_batch({**VALUES, "id": name})["number"])


def file(name: str) -> NewFile:
    return NewFile(name, "k", "out.jsonl", "batch_output", 1, 1, 2**40)


def result(number: int, pick: random.Random) -> Result:
    return Result(number, pick.randrange(9), pick.random() < 0.5, b"x", output_tokens=1)


def test_every_state_leads_to_an_end() -> None:
    for state in BatchState:
        reached = {state}
        while more := {after for each in reached for after in FOLLOWERS[each]} - reached:
            reached |= more
        assert any(each.has_ended for each in reached)
    assert all(BatchState.CANCELLING in FOLLOWERS[each] for each in CANCELLABLE)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_a_batch_goes_only_where_it_may_and_no_line_counts_twice(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pick, path = random.Random(seed), tmp_path_factory.mktemp("store") / "batches.db"
    store = BatchStore(path)
    number = added(store)
    state, ended = BatchState.VALIDATING, dict[int, bool]()
    for _ in range(40):
        match pick.choice(["advance", "advance", "results", "results", "close", "finish"]):
            case "advance":
                wanted = pick.choice([each for each in BatchState if not each.has_ended])
                moved = store.advance(number, wanted)
                assert moved == (wanted in FOLLOWERS[state])
                state = wanted if moved else state
            case "results":
                some = [result(number, pick) for _ in range(pick.randrange(4))]
                store.add_results(some)
                if not state.has_ended:
                    for one in some:
                        ended.setdefault(one.line, one.ok)
            case "close":
                store.close()
                store = BatchStore(path)
            case "finish" if {BatchState.COMPLETED, BatchState.CANCELLED} & FOLLOWERS[state]:
                lines = len(list(read_results(path, number, True)))
                assert lines == sum(ended.values())
                state = BatchState.COMPLETED if state == "finalizing" else BatchState.CANCELLED
                store.finish(number, state, [("output_file_id", file("file-out"))])
        row: Any = store.batch(number)
        assert row["state"] == state.value and row["completed"] == sum(ended.values())
        assert row["failed"] == len(ended) - sum(ended.values())
        assert list(store.lines_done(number)) == ([] if state.has_ended else sorted(ended))
        if state.has_ended:
            assert row[state.time_field] and row["output_file_id"] == "file-out"
            assert store.find_file("k", "file-out")
    store.close()


def test_what_a_full_disk_does_not_take_is_as_if_it_had_not_been(store: BatchStore) -> None:
    number = added(store)
    store.advance(number, BatchState.IN_PROGRESS, total=2)
    pages = store._database.execute("PRAGMA page_count").fetchone()[0]
    store._database.execute(f"PRAGMA max_page_count = {pages + 2}")
    large = [Result(number, 1, True, b"x"), Result(number, 2, True, b"x" * 1_000_000)]
    for _ in range(3):
        with pytest.raises(StorageFailed, match="full"):
            store.add_results(large)
        assert list(store.lines_done(number)) == []
    store._database.execute("PRAGMA max_page_count = 100000")
    store.add_results(large)
    assert list(store.lines_done(number)) == [1, 2]


def test_old_files_and_batches_are_forgotten_unless_they_are_needed(store: BatchStore) -> None:
    for name in ("file-0", "file-1"):
        store.add_file(file(name)._replace(purpose="batch", expires_at=5))
    store.add_file(file("file-2"))
    running, ended = added(store), added(store, "batch_1")
    store.advance(ended, BatchState.FAILED)
    now = int(time.time())
    assert store.remove_old(now, keep_s=100) == ["file-1"]  # file-0 is being read
    assert store.file_ids() == {"file-0", "file-2"}
    assert store.batch(running) and store.batch(ended), "it ended just now, whenever it began"
    store.remove_old(now + 200, keep_s=100)
    assert store.batch(running) and not store.batch(ended)


def test_a_key_keeps_so_many_batches_and_all_that_have_not_ended(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.store.MAX_BATCHES", 3)
    other = int(store.add_batch({**VALUES, "key": "other", "id": "batch_other"})["number"])
    running = added(store, "batch_running")
    for each in range(6):
        store.advance(added(store, f"batch_{each}"), BatchState.FAILED)
    rows, _ = store.page("batches", "k", 10)
    assert [row["id"] for row in rows] == ["batch_5", "batch_4", "batch_3", "batch_running"]
    assert store.batch(running) and store.batch(other)


def test_unfinished_batches_are_found_without_those_that_have_ended(store: BatchStore) -> None:
    queries = list[str]()
    store._database.set_trace_callback(queries.append)
    store.totals()
    store.user_of("file-0")
    store._database.set_trace_callback(None)
    assert len(queries) == 2
    for query in queries:
        plan = [row["detail"] for row in store._database.execute(f"EXPLAIN QUERY PLAN {query}")]
        assert any("unfinished_batches" in step for step in plan), plan
