"""Batches beside requests, and what kills or stops them."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.wire import Abort, Submit
from tests.router.batches.conftest import BatchClient, line
from tests.router.conftest import Server, StartServer, bearer, begin, eventually, key_flag, ok
from tests.router.scripted_engine import ScriptedEngine

Start = Callable[..., Server]
LINES = 12
TEXT = "hello world hello world"


@pytest.fixture
def start(start_server: StartServer, tmp_path: Path) -> Start:
    """Return a function that starts a router with the batches of a test."""
    return partial(start_server, f"--batch-dir={tmp_path}")


@pytest.fixture
def own(start: Start) -> Server:
    return start("--first-token-timeout-s=1", "--request-timeout-s=1")


def held(server: Server) -> ScriptedEngine:
    """Start an engine with four rows whose answers stop after two tokens."""
    return server.join(TEXT, hold_tokens_after=2)


def half_done(server: Server) -> tuple[ScriptedEngine, BatchClient, Any]:
    """Return such an engine, and a client with a batch of which lines are in its rows."""
    engine, client = held(server), BatchClient(server.url)
    batch = batch_of(client)
    eventually(has_submitted(engine, 4))  # as many as there are rows
    return engine, client, batch


def has_submitted(engine: ScriptedEngine, count: int) -> Callable[[], bool]:
    return lambda: len(engine.got(Submit)) == count


def assert_each_line_once(client: BatchClient, done: Any, count: int = LINES) -> None:
    assert done.status == "completed" and done.error_file_id is None
    assert done.request_counts.completed == count
    lines = client.lines(done.output_file_id)
    assert [each["custom_id"] for each in lines] == [f"r{number}" for number in range(count)]
    for each in lines:
        assert each["response"]["body"]["choices"][0]["text"] == TEXT


def batch_of(client: BatchClient, count: int = LINES, model: str = "tiny") -> Any:
    lines = [line(f"r{number}", model=model, max_tokens=30) for number in range(count)]
    return client.create(lines)


def test_a_request_gets_the_place_of_a_line_at_once(own: Server) -> None:
    engine, client, batch = half_done(own)
    time.sleep(1.5)  # no line is timed out, and no further one is sent
    assert len(engine.got(Submit)) == 4
    ok(own.complete(max_tokens=2))
    assert engine.got(Abort)
    for figure in ("batch_places_returned_total 1.0", "timeouts_total 0.0"):
        assert f"mlx_lm_server_{figure}" in own.metrics
    engine.behaviour.hold_tokens_after = None
    assert_each_line_once(client, client.wait(batch))
    again = [each for each in engine.got(Submit) if each.attempt]
    assert again and again[0].generated  # it went on where it was


def test_a_place_is_not_taken_back_for_a_key_that_has_its_part(
    start: Start, tmp_path: Path
) -> None:
    server = start(key_flag(tmp_path, "sk-a name=a", "sk-b name=b"))
    engine = held(server)  # of its four rows one is kept for other keys
    client = BatchClient(server.url, "sk-b")

    def ask(key: str, max_tokens: int) -> httpx.Response:
        body = {"prompt": "hello", "max_tokens": max_tokens}
        return server.client.post("/v1/completions", json=body, headers=bearer(key))

    asked = [begin(ask, "sk-a", 30) for _ in range(4)]
    eventually(has_submitted(engine, 3))
    batch = batch_of(client)
    eventually(has_submitted(engine, 4))
    time.sleep(0.5)
    assert len(engine.got(Submit)) == 4
    ok(ask("sk-b", 2))
    assert not asked[0].done()
    engine.behaviour.hold_tokens_after = None
    assert all(each.result().status_code == 200 for each in asked)
    assert_each_line_once(client, client.wait(batch))


def test_lines_count_for_no_limit_of_requests(start: Start) -> None:
    limits = ("--max-concurrent-requests=1", "--max-queue-size=1", "--rate-limit-requests=2")
    server = start(*limits)
    server.join(TEXT)
    client = BatchClient(server.url)
    assert_each_line_once(client, client.wait(batch_of(client)))
    assert [server.complete().status_code for _ in range(3)] == [200, 200, 429]


def test_a_killed_router_leaves_each_line_to_the_next_one(start: Start, tmp_path: Path) -> None:
    count = 60
    for kill in range(3):
        server = start()
        engine = server.join(TEXT, step_s=0.02)
        client = BatchClient(server.url)
        if kill == 0:
            batch = batch_of(client, count)
        if kill == 2:
            assert_each_line_once(client, client.wait(batch), count)
            break
        lines = max(8 * (kill + 1), client.completed(batch) + 1)
        eventually(lambda: client.completed(batch) >= lines)  # noqa: B023
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        engine.leave()
    files = {each.name for each in (tmp_path / "files").iterdir()}
    assert files == {each.id for each in client.api.files.list()}


def test_a_stopped_router_leaves_lines_to_the_next_one(start: Start) -> None:
    server = start()
    held(server)
    batch = batch_of(BatchClient(server.url))
    assert server.stop() == 0
    server = start()
    client = BatchClient(server.url)
    assert client.api.batches.retrieve(batch.id).status in ("validating", "in_progress")
    server.start_engine(TEXT)
    assert_each_line_once(client, client.wait(batch))


def test_a_lost_engine_costs_no_line(own: Server) -> None:
    engine, client, batch = half_done(own)
    engine.leave()
    own.start_engine(TEXT, name="engine-1")
    assert_each_line_once(client, client.wait(batch))


def test_lines_of_a_model_that_is_away_leave_their_places_to_others(
    start: Start,
) -> None:
    server = start("--restart-wait-s=0.5", "--max-batch-requests=2")
    engine = held(server)
    client = BatchClient(server.url)
    batch = batch_of(client)
    eventually(has_submitted(engine, 2))
    engine.leave()
    server.join(TEXT, name="engine-1", model="other")
    assert_each_line_once(client, client.wait(batch_of(client, model="other")))
    time.sleep(1)  # the version without engines is forgotten
    assert client.api.batches.retrieve(batch.id).status == "in_progress"
    server.start_engine(TEXT, name="engine-2")
    assert_each_line_once(client, client.wait(batch, 90))


def test_lines_that_wait_for_a_row_leave_their_places_to_those_of_an_idle_model(
    start: Start,
) -> None:
    server = start("--restart-wait-s=0.5", "--max-batch-requests=2")
    busy = server.join(TEXT, max_sequences=1, hold_tokens_after=2)
    client = BatchClient(server.url)
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "hello", "stream": True, "max_tokens": 30}
    ):
        eventually(has_submitted(busy, 1))
        batch = batch_of(client)
        server.start_engine(TEXT, name="engine-1", model="other")
        assert_each_line_once(client, client.wait(batch_of(client, model="other")))
        assert client.completed(batch) == 0
    busy.behaviour.hold_tokens_after = None
    assert_each_line_once(client, client.wait(batch, 90))


def test_a_line_whose_choices_run_one_after_the_other_is_not_begun_again(
    start: Start,
) -> None:
    server = start("--restart-wait-s=0.5")
    engine = server.join(TEXT, max_sequences=1, step_s=0.3)
    client = BatchClient(server.url)
    done = client.run([line("a", n=3, max_tokens=30)])
    (answer,) = client.lines(done.output_file_id)
    assert [each["text"] for each in answer["response"]["body"]["choices"]] == [TEXT] * 3
    assert len(engine.got(Submit)) == 3


def test_a_line_larger_than_a_limit_that_was_lowered_is_refused_alone(start: Start) -> None:
    server = start()
    client = BatchClient(server.url)
    batch = client.create([line("large", prompt="x" * 30_000), line("small", max_tokens=30)])
    client.wait(batch, states=("in_progress",))
    assert server.stop() == 0
    server = start("--max-request-bytes=20000")
    client = BatchClient(server.url)
    server.start_engine(TEXT)
    done = client.wait(batch)
    counts = done.request_counts
    assert (done.status, counts.completed, counts.failed) == ("completed", 1, 1)
    (failed,) = client.lines(done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("large", 413)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
def test_a_full_disk_holds_lines_up_and_loses_none(own: Server, tmp_path: Path) -> None:
    engine, client, batch = half_done(own)
    before = resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE, (1000, before[1]))
    engine.behaviour.hold_tokens_after = None
    eventually(lambda: "batch_store_errors_total 0.0" not in own.metrics)
    with pytest.raises(openai.APIStatusError) as refused:
        client.upload(b"x" * 5000)
    assert refused.value.status_code == 503
    ok(own.complete())  # nobody else is concerned
    assert client.api.batches.retrieve(batch.id).status == "in_progress"
    resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE, before)
    assert_each_line_once(client, client.wait(batch))
    assert not client.leftovers(tmp_path)


def test_lines_of_a_removed_key_get_an_error(start: Start, tmp_path: Path) -> None:
    server = start(key_flag(tmp_path, "sk-a name=a", "sk-b name=b"))
    batch = BatchClient(server.url, "sk-a").create([line("a")])
    server.stop()
    server = start(key_flag(tmp_path, "sk-b name=b"))
    server.start_engine("hello")
    eventually(lambda: server.metric("batch_lines_total") == 1)
    eventually(lambda: server.metric("batches_unfinished ") == 0)
    server.stop()
    server = start(key_flag(tmp_path, "sk-a2 name=a"))  # another key of the same holder
    client = BatchClient(server.url, "sk-a2")
    (failed,) = client.lines(client.api.batches.retrieve(batch.id).error_file_id)
    assert failed["response"]["status_code"] == 401
