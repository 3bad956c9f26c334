"""Stored responses that survive a restart."""

from __future__ import annotations

import shutil
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.responses.archive import ResponseArchive
from router.responses.store import ResponseStore
from tests.router.conftest import StartServer, eventually, ok
from tests.router.responses.test_responses import ask, turn


@contextmanager
def opened(directory: Path, **limits: int) -> Iterator[ResponseStore]:
    """Yield a store with the responses in a directory. At its end, all of them are written."""
    store = ResponseStore(10**6, **limits, archive=ResponseArchive(directory))
    try:
        yield store
    finally:
        store.close()


def assert_only(directory: Path, *names: str) -> None:
    """Check which responses have survived."""
    with opened(directory) as store:
        assert len(store) == len(names) and all(store.find("k", name) for name in names)


def run(directory: Path, statement: str, *values: object) -> list[Any]:
    with closing(sqlite3.connect(directory / "responses.db")) as database, database:
        return database.execute(statement, values).fetchall()


def test_conversations_and_their_order_survive(tmp_path: Path) -> None:
    with opened(tmp_path, max_responses=3) as store:
        one = turn(1)
        store.put("a", one)
        store.put("b", turn(2, one))
        store.put("c", turn(3))
        store.delete("k", "a")  # "b" builds on it
        store.put("d", turn(4))
        before = store.size_bytes
    with opened(tmp_path, max_responses=3) as store:
        assert (len(store), store.size_bytes) == (3, before)
        assert len(store.find("k", "b").conversation(10**6, whole=True)) == 4
        store.find("k", "c")
        store.put("e", turn(5, store.find("k", "d")))  # "b" goes, with what it built on
    with opened(tmp_path) as store:
        assert [store.find("k", name).item_ids[0] for name in "cde"] == ["in_3", "in_4", "in_5"]
        assert store.find_turn("k", "in_1") is None
    assert len(list(tmp_path.glob("responses.db"))) == 1


def test_what_is_deleted_is_gone_from_a_private_directory(tmp_path: Path) -> None:
    directory = tmp_path / "archive"
    with opened(directory) as store:
        store.put("a", turn(1))
        store.put("b", turn(2))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with opened(directory) as store:
        store.delete("k", "a")
    content = b"".join(path.read_bytes() for path in directory.iterdir())
    assert b"in_2" in content and b"in_1" not in content


def test_a_conversation_whose_beginning_was_lost_is_gone_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        one = turn(1)
        store.put("a", one)
        store.put("b", two := turn(2, one))
        store.put("c", turn(3, two))
        store.put("d", turn(4))
    run(tmp_path, "DELETE FROM turns WHERE number = ?", one.number)  # the disk was full
    with opened(tmp_path) as store:
        assert len(store) == 1
        assert store.find("k", "d").item_ids[0] == "in_4"
        store.put("e", turn(5))
    rows = run(tmp_path, "SELECT response_id FROM turns ORDER BY number")
    assert rows == [("d",), ("e",)]


def remove_after_a_response(store: ResponseStore, directory: Path) -> None:
    store.put("a", turn(1))
    eventually(lambda: run(directory, "SELECT count(*) FROM turns") == [(1,)])
    shutil.rmtree(directory)


def test_what_comes_after_the_directory_was_removed_survives_and_a_line_says_what_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "responses"
    with opened(directory) as store:
        remove_after_a_response(store, directory)
        store.put("b", turn(2))
    assert_only(directory, "b")
    assert f"{directory} was removed" in caplog.text


def test_a_new_file_that_cannot_be_used_yet_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    directory = tmp_path / "responses"
    with opened(directory) as store:
        remove_after_a_response(store, directory)
        with monkeypatch.context() as patched:
            patched.setattr("router.responses.archive.sqlite3.connect", fails)
            store.put("b", turn(2))
            eventually(lambda: "unable to open" in caplog.text)
        store.put("c", turn(3))
    assert_only(directory, "b", "c")


def test_a_restarted_router_has_the_responses(start_server: StartServer, tmp_path: Path) -> None:
    flag = f"--response-store-dir={tmp_path / 'responses'}"
    server = start_server(flag)
    server.join("hello world")
    first = ask(server).json()
    assert server.stop() == 0
    server = start_server(flag)
    server.join("hello world")
    assert server.client.get(f"/v1/responses/{first['id']}").json() == first
    ok(ask(server, "and?", previous_response_id=first["id"]))
    with pytest.raises(AssertionError, match="--response-store-dir: another router uses"):
        start_server(flag)


def test_a_damaged_file_ends_the_start_with_a_line_that_says_so(
    start_server: StartServer, tmp_path: Path
) -> None:
    with opened(tmp_path) as store:
        for number in range(200):
            store.put(str(number), turn(number))
    file = tmp_path / "responses.db"
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + b"\xff" * 8192 + whole[middle + 8192 :])
    with pytest.raises(AssertionError) as caught:
        start_server(f"--response-store-dir={tmp_path}")
    assert f"--response-store-dir: {tmp_path} cannot be read: " in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_what_was_deleted_stays_deleted_though_the_disk_failed_at_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.responses.archive._AGAIN_S", 0.01)
    write, failures = ResponseArchive._write, ["full", "full"]

    def fails(archive: ResponseArchive, number: int, change: Any) -> bool:
        if change == "remove" and failures:
            failures.pop()
            return False
        return write(archive, number, change)

    monkeypatch.setattr(ResponseArchive, "_write", fails)
    with opened(tmp_path) as store:
        store.put("a", turn(1))
        store.put("b", turn(2))
        eventually(lambda: run(tmp_path, "SELECT count(*) FROM turns") == [(2,)])
        store.delete("k", "a")
        eventually(lambda: not failures)
        store.put("c", turn(3))
    assert_only(tmp_path, "b", "c")


def test_what_the_disk_is_too_slow_for_is_written_as_it_is_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writes, may_write = ResponseArchive._write, threading.Event(), threading.Event()

    def slow(archive: ResponseArchive, number: int, change: Any) -> bool:
        writes.set()
        return may_write.wait(10) and write(archive, number, change)

    monkeypatch.setattr(ResponseArchive, "_write", slow)
    with opened(tmp_path) as store:
        store.put("a", turn(1))
        assert writes.wait(10)
        store.put("b", two := turn(2))
        store.put("c", turn(3, two))
        store.delete("k", "a")
        store.delete("k", "b")  # "c" builds on it
        may_write.set()
    assert_only(tmp_path, "c")
    assert run(tmp_path, "SELECT response_id FROM turns ORDER BY number") == [(None,), ("c",)]
