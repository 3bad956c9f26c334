"""Batches beside requests, and what kills or stops them."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shared.wire import Abort, Submit
from tests.router.batches.conftest import BatchClient, line
from tests.router.conftest import Server, StartServer, bearer, eventually
from tests.router.scripted_engine import ScriptedEngine

Start = Callable[..., ScriptedEngine]
LINES = 12
TEXT = "hello world hello world"


@pytest.fixture
def own(start_server: StartServer, tmp_path: Path) -> Server:
    return start_server(
        f"--batch-dir={tmp_path}", "--first-token-timeout-s=1", "--request-timeout-s=1"
    )


def held(server: Server) -> ScriptedEngine:
    """Start an engine with four rows whose answers stop after two tokens."""
    return server.join(TEXT, hold_tokens_after=2)


def has_submitted(engine: ScriptedEngine, count: int) -> Callable[[], bool]:
    return lambda: len(engine.got(Submit)) == count


def assert_each_line_once(client: BatchClient, done: Any, count: int = LINES) -> None:
    assert done.status == "completed" and done.error_file_id is None
    assert done.request_counts.completed == count
    lines = client.lines(done.output_file_id)
    assert [each["custom_id"] for each in lines] == [f"r{number}" for number in range(count)]
    for each in lines:
        assert each["response"]["body"]["choices"][0]["text"] == TEXT


def batch_of(client: BatchClient, count: int = LINES) -> Any:
    return client.create([line(f"r{number}", max_tokens=30) for number in range(count)])


def test_a_request_gets_the_place_of_a_line_at_once(own: Server) -> None:
    engine = held(own)
    client = BatchClient(own.url)
    batch = batch_of(client)
    eventually(has_submitted(engine, 4))  # as many as there are rows
    time.sleep(1.5)  # no line is timed out, and no further one is sent
    assert len(engine.got(Submit)) == 4
    assert own.complete(max_tokens=2).status_code == 200
    assert engine.got(Abort)
    metrics = own.metrics
    assert "mlx_lm_server_batch_places_returned_total 1.0" in metrics
    assert "mlx_lm_server_timeouts_total 0.0" in metrics
    engine.behaviour.hold_tokens_after = None
    assert_each_line_once(client, client.wait(batch))
    again = [each for each in engine.got(Submit) if each.attempt]
    assert again and again[0].generated  # it went on where it was


def test_a_place_is_not_taken_back_for_a_key_that_has_its_part(
    start_server: StartServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-a name=a\nsk-b name=b\n")
    server = start_server(f"--api-key-file={keys}", f"--batch-dir={tmp_path / 'd'}")
    engine = held(server)  # of its four rows one is kept for other keys
    url = f"{server.url}/v1/completions"
    client = BatchClient(server.url, "sk-b")
    with ThreadPoolExecutor() as threads:
        body = {"prompt": "hello", "max_tokens": 30}
        ask = partial(httpx.post, url, json=body, headers=bearer("sk-a"), timeout=60)
        asked = [threads.submit(ask) for _ in range(4)]
        eventually(has_submitted(engine, 3))
        batch = batch_of(client)
        eventually(has_submitted(engine, 4))
        time.sleep(0.5)
        assert len(engine.got(Submit)) == 4
        answer = httpx.post(url, json=body | {"max_tokens": 2}, headers=bearer("sk-b"))
        assert answer.status_code == 200 and not asked[0].done()
        engine.behaviour.hold_tokens_after = None
        assert all(each.result().status_code == 200 for each in asked)
    assert_each_line_once(client, client.wait(batch))


def test_lines_count_for_no_limit_of_requests(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(
        f"--batch-dir={tmp_path}",
        "--max-concurrent-requests=1",
        "--max-queue-size=1",
        "--rate-limit-requests=2",
    )
    server.join(TEXT)
    client = BatchClient(server.url)
    assert_each_line_once(client, client.wait(batch_of(client)))
    assert server.complete().status_code == server.complete().status_code == 200
    assert server.complete().status_code == 429


def test_a_killed_router_leaves_each_line_to_the_next_one(
    start_server: StartServer, tmp_path: Path
) -> None:
    count = 60
    for kill in range(3):
        server = start_server(f"--batch-dir={tmp_path}")
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
    assert {each.name for each in (tmp_path / "files").iterdir()} == {
        each.id for each in client.api.files.list()
    }


def test_a_stopped_router_leaves_lines_to_the_next_one(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(f"--batch-dir={tmp_path}")
    held(server)
    batch = batch_of(BatchClient(server.url))
    assert server.stop() == 0
    server = start_server(f"--batch-dir={tmp_path}")
    client = BatchClient(server.url)
    assert client.api.batches.retrieve(batch.id).status in ("validating", "in_progress")
    server.start_engine(TEXT)
    assert_each_line_once(client, client.wait(batch))


def test_a_lost_engine_costs_no_line(own: Server) -> None:
    engine = held(own)
    client = BatchClient(own.url)
    batch = batch_of(client)
    eventually(has_submitted(engine, 4))
    engine.leave()
    own.start_engine(TEXT, name="engine-1")
    assert_each_line_once(client, client.wait(batch))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
def test_a_full_disk_holds_lines_up_and_loses_none(own: Server, tmp_path: Path) -> None:
    engine = held(own)
    client = BatchClient(own.url)
    batch = batch_of(client)
    eventually(has_submitted(engine, 4))
    before = resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE, (1000, before[1]))
    engine.behaviour.hold_tokens_after = None
    eventually(lambda: "batch_store_errors_total 0.0" not in own.metrics)
    with pytest.raises(openai.APIStatusError) as refused:
        client.upload(b"x" * 5000)
    assert refused.value.status_code == 503
    assert own.complete().status_code == 200  # nobody else is concerned
    assert client.api.batches.retrieve(batch.id).status == "in_progress"
    resource.prlimit(own.process.pid, resource.RLIMIT_FSIZE, before)
    assert_each_line_once(client, client.wait(batch))
    assert not list((tmp_path / "new").iterdir())


def test_lines_of_a_key_that_was_removed_get_an_error(
    start_server: StartServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-a name=a\nsk-b name=b\n")
    directory = f"--batch-dir={tmp_path / 'd'}"
    server = start_server(f"--api-key-file={keys}", directory)
    batch = BatchClient(server.url, "sk-a").create([line("a")])
    server.stop()
    keys.write_text("sk-b name=b\n")
    server = start_server(f"--api-key-file={keys}", directory)
    server.start_engine("hello")
    eventually(lambda: server.metric("batch_lines_total") == 1)
    eventually(lambda: server.metric("batches_unfinished ") == 0)
    server.stop()
    keys.write_text("sk-a2 name=a\n")  # another key of the same holder
    client = BatchClient(start_server(f"--api-key-file={keys}", directory).url, "sk-a2")
    (failed,) = client.lines(client.api.batches.retrieve(batch.id).error_file_id)
    assert failed["response"]["status_code"] == 401
