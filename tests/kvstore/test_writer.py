from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import writer as writer_module
from kvstore.directory import BlockDirectory, BlockKey
from kvstore.store import DiskStore
from kvstore.writer import PendingWrite, Writer
from tests.kvstore.blocks import file_of, key_of, wait_until


class FaultyDirectory(BlockDirectory):
    """A directory on a disk that can be made slow, full or faulty."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_write = threading.Event()
        self.may_write.set()
        self.errors: list[OSError] = []
        self.always: OSError | None = None
        self.attempts = 0

    def write(self, key: BlockKey, data: bytes, durable: bool) -> None:
        assert self.may_write.wait(30)
        self.attempts += 1
        if self.errors or self.always:
            raise self.errors.pop() if self.errors else self.always or OSError()
        super().write(key, data, durable)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[FaultyDirectory]:
    directory = FaultyDirectory(tmp_path)
    yield directory
    directory.may_write.set()
    directory.close()


@pytest.fixture
def store(directory: FaultyDirectory) -> DiskStore:
    store = DiskStore(directory)
    store.load()
    return store


class Outcomes(dict[int, str]):
    def put(self, number: int, data: bytes | None = None) -> PendingWrite:
        return PendingWrite(
            key_of(number),
            file_of(number) if data is None else data,
            lambda reason: self.__setitem__(number, reason),
        )


def test_queued_blocks_are_written_and_reported_as_done(store: DiskStore) -> None:
    writer, outcomes = Writer(store), Outcomes()
    for number in range(10):
        assert writer.offer(outcomes.put(number)) == ""
    writer.close(20)
    assert outcomes == dict.fromkeys(range(10), "")
    assert store.has([key_of(number) for number in range(10)]) == 10


def test_a_full_queue_refuses_and_counts(directory: FaultyDirectory, store: DiskStore) -> None:
    directory.may_write.clear()
    writer, outcomes = Writer(store, queue_size=3), Outcomes()
    refused = [number for number in range(10) if writer.offer(outcomes.put(number))]
    assert len(refused) in (6, 7)  # besides the three in the queue, one may be in progress
    assert writer.drops == len(refused)
    directory.may_write.set()
    writer.close(20)
    assert sorted(outcomes) == [number for number in range(10) if number not in refused]


def test_persistent_offers_wait_for_room(directory: FaultyDirectory, store: DiskStore) -> None:
    directory.may_write.clear()
    writer, outcomes = Writer(store, persistent=True, queue_size=1), Outcomes()
    threading.Timer(0.3, directory.may_write.set).start()
    for number in range(10):
        assert writer.offer(outcomes.put(number), wait_s=20) == ""
    writer.close(20)
    assert outcomes == dict.fromkeys(range(10), "")
    assert writer.drops == 0


def test_a_queue_of_large_blocks_is_bounded_in_bytes(
    directory: FaultyDirectory, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUED_BYTES", 2 * len(file_of(0)))
    directory.may_write.clear()
    writer, outcomes = Writer(store), Outcomes()
    accepted = [number for number in range(10) if not writer.offer(outcomes.put(number))]
    assert len(accepted) == 2
    directory.may_write.set()
    writer.close(20)


def test_persistent_writes_are_retried_up_to_the_limit(
    directory: FaultyDirectory, store: DiskStore
) -> None:
    writer, outcomes = Writer(store, persistent=True, max_retries=2), Outcomes()
    directory.errors = [OSError(errno.EIO, "once"), OSError(errno.EIO, "twice")]
    writer.offer(outcomes.put(1))
    wait_until(lambda: outcomes == {1: ""})
    directory.attempts, directory.always = 0, OSError(errno.EIO, "always")
    writer.offer(outcomes.put(2))
    wait_until(lambda: 2 in outcomes)
    assert "EIO" in outcomes[2]
    assert (directory.attempts, writer.drops) == (3, 1)
    writer.close(20)


def test_best_effort_does_not_retry(directory: FaultyDirectory, store: DiskStore) -> None:
    directory.always = OSError(errno.EIO, "always")
    writer, outcomes = Writer(store, in_background=False), Outcomes()
    assert writer.offer(outcomes.put(1)) == ""
    assert "EIO" in outcomes[1]
    assert directory.attempts == 1
    writer.close(20)


def test_without_a_queue_the_block_is_there_when_offer_returns(store: DiskStore) -> None:
    writer, outcomes = Writer(store, in_background=False), Outcomes()
    assert writer.offer(outcomes.put(1)) == ""
    assert store.has([key_of(1)]) == 1 and outcomes == {1: ""}
    writer.close(20)


def test_a_full_disk_drops_with_one_log_line_and_recovers_by_itself(
    directory: FaultyDirectory,
    store: DiskStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writer_module, "FULL_DISK_PAUSE_S", 0.2)
    writer, outcomes = Writer(store, persistent=True), Outcomes()
    writer.offer(outcomes.put(0))
    wait_until(lambda: outcomes == {0: ""})
    directory.always = OSError(errno.ENOSPC, "full")
    with caplog.at_level(logging.WARNING):
        writer.offer(outcomes.put(1))
        wait_until(lambda: outcomes.get(1) == "the disk is full")
        assert [writer.offer(outcomes.put(n)) for n in range(2, 9)] == ["the disk is full"] * 7
    assert writer.drops == 8
    assert len(caplog.records) == 1
    assert store.has([key_of(0)]) == 1  # reading goes on
    directory.always = None
    wait_until(lambda: writer.offer(outcomes.put(20)) == "")
    wait_until(lambda: outcomes.get(20) == "")
    writer.close(20)


def test_an_invalid_block_is_dropped_and_the_next_is_written(store: DiskStore) -> None:
    writer, outcomes = Writer(store), Outcomes()
    writer.offer(outcomes.put(1, b"rubbish"))
    writer.offer(outcomes.put(2))
    wait_until(lambda: outcomes.get(2) == "")
    assert "not a block file" in outcomes[1]
    assert writer.drops == 1
    writer.close(20)


def test_closing_ends_within_its_timeout(directory: FaultyDirectory, store: DiskStore) -> None:
    directory.may_write.clear()
    writer, outcomes = Writer(store), Outcomes()
    for number in range(5):
        writer.offer(outcomes.put(number))
    writer.close(0.0)
    directory.may_write.set()
    wait_until(lambda: len(outcomes) == 5)
    assert "shutting down" in outcomes.values()


def test_limits_are_enforced_without_any_put(directory: FaultyDirectory, tmp_path: Path) -> None:
    store = DiskStore(directory, ttl_s=0.5)
    store.load()
    writer, outcomes = Writer(store, flush_interval_s=0.1), Outcomes()
    writer.offer(outcomes.put(1))
    wait_until(lambda: outcomes == {1: ""})
    wait_until(lambda: store.stats().expired_total == 1)
    writer.close(20)
