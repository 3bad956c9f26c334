"""Batches on a whole server: real engines, real kills, and a server of the command's own."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.process import Process
from tests.e2e.server import Server, private_directory, serving
from tests.router.batches.conftest import BatchClient, Body, line

ROWS = 4


def completion(name: str, max_tokens: int = 24) -> Body:
    body = line(name, prompt=f"a text that {name} begins", max_tokens=max_tokens)
    del body["body"]["model"]
    body["body"] |= {"temperature": 0, "ignore_eos": True}
    return body


@pytest.fixture(scope="module")
def server(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("batches")
    rows = f"--max-batch-size={ROWS}", f"--completion-batch-size={ROWS}"
    with serving(tiny_model("llama"), "--no-ssd", f"--batch-dir={directory}", *rows) as server:
        yield server


@pytest.fixture
def client(server: Server) -> BatchClient:
    return BatchClient(server.url)


def assert_whole(server: Server, client: BatchClient, given: list[Body], done: object) -> None:
    """Each line has its answer once, and the text that a request of its own would have got."""
    found = client.lines(getattr(done, "output_file_id", None))
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in given]
    for asked, each in list(zip(given, found, strict=True))[:: max(1, len(given) // 4)]:
        text = each["response"]["body"]["choices"][0]["text"]
        assert text == server.text(**asked["body"])


def test_killed_processes_lose_no_line_and_give_none_twice(
    server: Server, client: BatchClient
) -> None:
    given = [completion(f"r{number}") for number in range(80)]
    batch = client.create(given)

    def completed() -> int:
        try:
            return client.completed(batch)
        except Exception:  # the router is being started
            return 0

    for number, name in enumerate(("router", "engine", "router")):
        server.wait_until(lambda least=5 + 15 * number: completed() >= least, 120, name)  # type: ignore[misc]
        server.kill(name)
    server.wait_until(lambda: completed() >= 50, 120, "the batch")
    server.wait_until(server.is_ready, 120, "ready")
    done = client.wait(batch, 120)
    assert (done.status, done.request_counts.completed) == ("completed", 80)
    assert_whole(server, client, given, done)


def test_a_request_beside_a_batch_that_fills_all_rows_gets_one_at_once(
    server: Server, client: BatchClient
) -> None:
    given = [completion(f"long{number}", 400) for number in range(ROWS)]
    batch = client.create(given)
    server.wait_until(lambda: server.sequences_in_flight() == ROWS, 60, "all rows")
    answer = server.complete("a question", max_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2
    assert client.completed(batch) == 0  # none had ended
    done = client.wait(batch, 120)
    assert done.status == "completed"
    assert_whole(server, client, given, done)


def test_the_command_goes_on_with_a_server_of_its_own(tiny_model: Callable[..., Path]) -> None:
    given = [completion(f"r{number}", 100) for number in range(30)]
    with private_directory() as private:
        source, target = Path(private) / "in.jsonl", Path(private) / "out.jsonl"
        source.write_text("".join(json.dumps(each) + "\n" for each in given))
        flags = ["--model", str(tiny_model("llama")), "--no-ssd", "--max-batch-size=2"]
        command = ["batch", str(source), str(target), "--serve", *flags]
        first = Process("mlx_lm_server", *command, XDG_RUNTIME_DIR=private).popen
        database = target.with_name("out.jsonl.batch") / "server" / "batches.db-wal"
        state = database.parents[1] / "state.json"
        while not state.exists():
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)  # jobs of a shell in the background ignore SIGINT
        assert first.wait(60) == 128 + signal.SIGINT
        assert not target.exists()
        second = Process("mlx_lm_server", *command, XDG_RUNTIME_DIR=private)
        assert second.popen.wait(240) == 0, second.log
        found = [json.loads(each)["custom_id"] for each in target.read_text().splitlines()]
        assert found == [each["custom_id"] for each in given]
        assert not state.parent.exists()
