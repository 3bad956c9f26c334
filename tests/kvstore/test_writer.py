from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import health, queue
from kvstore.queue import PendingWrite
from kvstore.store import DiskStore
from kvstore.writer import Writer
from shared.hashing import HASH_BYTES
from tests.kvstore.blocks import NAMESPACE, file_of, key_of, wait_until
from tests.kvstore.tier import Tier


class WritingTier(Tier):
    """A tier with writers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._writers: list[Writer] = []

    def start(self, on: DiskStore | None = None, **options: Any) -> tuple[Writer, Outcomes]:
        self._writers.append(Writer(on or self.store, **options))
        return self._writers[-1], Outcomes()

    def start_and_write(self, **options: Any) -> tuple[Writer, Outcomes]:
        """Start a writer, which has written block 0."""
        writer, outcomes = self.start(**options)
        assert writer.offer(outcomes.put(0)) == ""
        wait_until(lambda: outcomes == {0: ""})
        return writer, outcomes

    def close(self) -> None:
        self.disk.may_write.set()
        for writer in self._writers:
            writer.close(20)
        self.disk.always = None
        super().close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[WritingTier]:
    tier = WritingTier(tmp_path / "blocks")
    yield tier
    tier.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(health, "LONGEST_PAUSE_S", 0.2)


class Outcomes(dict[int, str]):
    def put(
        self, number: int, data: bytes | None = None, namespace: str = NAMESPACE
    ) -> PendingWrite:
        return PendingWrite(
            key_of(number, namespace),
            file_of(number, namespace=namespace) if data is None else data,
            lambda reason: self.__setitem__(number, reason),
        )


def test_a_full_queue_refuses_and_counts_and_what_is_in_it_is_written(tier: WritingTier) -> None:
    tier.disk.may_write.clear()
    writer, outcomes = tier.start(queue_size=3)
    refused = [number for number in range(10) if writer.offer(outcomes.put(number))]
    assert len(refused) in (6, 7)  # besides the three in the queue, one may be in progress
    assert writer.drops == len(refused)
    tier.disk.may_write.set()
    writer.close(20)
    accepted = set(range(10)) - set(refused)
    assert outcomes == dict.fromkeys(accepted, "")
    assert tier.there(*range(10)) == accepted


def test_blocks_that_wait_when_their_namespace_is_cleared_are_answered(tier: WritingTier) -> None:
    tier.disk.may_write.clear()
    writer, outcomes = tier.start(persistent=True)
    for number in range(4):
        assert writer.offer(outcomes.put(number)) == ""
    writer.clear(NAMESPACE)
    assert set(outcomes.values()) == {"cleared"} and len(outcomes) in (3, 4)  # one may be written
    assert writer.offer(outcomes.put(9)) == ""
    tier.disk.may_write.set()
    wait_until(lambda: 9 in outcomes)
    writer.close(20)
    assert tier.there(*range(10)) == {9}


def test_blocks_that_come_after_several_namespaces_were_cleared_are_kept(tier: WritingTier) -> None:
    tier.disk.may_write.clear()
    writer, outcomes = tier.start()
    namespaces = [f"b{number}" * HASH_BYTES for number in range(8)]
    writer.offer(outcomes.put(0))
    for namespace in namespaces:
        writer.clear(namespace)
    for number, namespace in enumerate(namespaces, start=1):
        assert writer.offer(outcomes.put(number, namespace=namespace)) == ""
    tier.disk.may_write.set()
    wait_until(lambda: len(outcomes) == 9)
    writer.close(20)
    for number, namespace in enumerate(namespaces, start=1):
        assert tier.there(number, namespace=namespace) == {number}


def test_a_queue_of_large_blocks_is_bounded_in_bytes(
    tier: WritingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "MAX_QUEUED_BYTES", 2 * len(file_of(0)))
    tier.disk.may_write.clear()
    writer, outcomes = tier.start()
    accepted = [number for number in range(10) if not writer.offer(outcomes.put(number))]
    assert len(accepted) in (2, 3)  # besides those in the queue, one may be in progress
    tier.disk.may_write.set()


def test_persistent_writes_are_retried_up_to_the_limit(tier: WritingTier) -> None:
    writer, outcomes = tier.start(persistent=True, max_retries=2)
    tier.disk.errors = [OSError(errno.EIO, "once"), OSError(errno.EIO, "twice")]
    writer.offer(outcomes.put(1))
    wait_until(lambda: outcomes == {1: ""})
    tier.disk.attempts, tier.disk.always = 0, OSError(errno.EIO, "always")
    writer.offer(outcomes.put(2))
    wait_until(lambda: 2 in outcomes)
    assert "EIO" in outcomes[2]
    assert (tier.disk.attempts, writer.drops) == (3, 1)


def test_best_effort_does_not_retry(tier: WritingTier) -> None:
    tier.disk.errors = [OSError(errno.EIO, "once")]
    writer, outcomes = tier.start()
    assert writer.offer(outcomes.put(1)) == ""
    wait_until(lambda: 1 in outcomes)
    assert "EIO" in outcomes[1]  # a second try would have worked


@pytest.mark.parametrize(
    ("code", "state", "persistent"),
    [
        (errno.ENOSPC, "full", True),
        (errno.EDQUOT, "full", False),
        (errno.EROFS, "read_only", True),
        (errno.EIO, "failing", False),
    ],
)
def test_a_disk_that_fails_is_one_log_line_and_is_used_again_by_itself(
    tier: WritingTier, caplog: pytest.LogCaptureFixture, code: int, state: str, persistent: bool
) -> None:
    writer, outcomes = tier.start_and_write(persistent=persistent, max_retries=0)
    tier.disk.always = OSError(code, "it fails")
    with caplog.at_level(logging.WARNING):
        writer.offer(outcomes.put(1))
        wait_until(lambda: 1 in outcomes)
        assert tier.store.stats().state == state
        assert tier.store.stats().disk_errors_total >= 1
        for number in range(2, 9):
            if not (refused := writer.offer(outcomes.put(number))):
                wait_until(lambda number=number: number in outcomes)  # type: ignore[misc]
            assert refused or outcomes[number]
        assert writer.drops == 8
        assert tier.store.has([key_of(0)]) == 1  # reading goes on
        assert len(caplog.records) == 1
        tier.disk.always = None
        wait_until(lambda: len(caplog.records) == 2)  # without any put
        assert tier.store.stats().state == "ok"
    assert writer.offer(outcomes.put(20)) == ""
    wait_until(lambda: outcomes.get(20) == "")


def test_a_vanished_directory_is_one_log_line_and_is_created_again(
    tier: WritingTier, caplog: pytest.LogCaptureFixture
) -> None:
    writer, outcomes = tier.start_and_write(flush_interval_s=0.05)
    with caplog.at_level(logging.WARNING):
        lock = tier.directory.root / "lock"
        tier.directory.root.rename(tier.directory.root.with_name("aside"))
        wait_until(lambda: tier.store.stats().state == "gone" or lock.exists())
        wait_until(lambda: tier.store.stats().state == "ok" and lock.exists())
        assert tier.store.has([key_of(0)]) == 0
        assert tier.store.stats().blocks == 0
        writer.offer(outcomes.put(1))
        wait_until(lambda: outcomes.get(1) == "")
        assert [record.message.split(":")[0] for record in caplog.records] == [
            f"the directory is gone ([Errno {errno.ENOENT}] {tier.directory.root})",
            "the disk works again, blocks are stored",
        ]


def test_a_directory_on_a_disk_that_is_not_mounted_is_not_created_elsewhere(
    tier: WritingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, outcomes = tier.start_and_write(flush_interval_s=0.05)
    monkeypatch.setattr(tier.directory, "_device", -7)  # what is below now is another disk
    aside = tier.directory.root.with_name("aside")
    tier.directory.root.rename(aside)
    wait_until(lambda: tier.store.stats().state == "gone")
    assert writer.offer(outcomes.put(1)) or outcomes.setdefault(1, "")
    for _ in range(3):
        tier.store.flush()
    assert not tier.directory.root.exists()
    aside.rename(tier.directory.root)  # it is mounted again
    wait_until(lambda: tier.store.stats().state == "ok")
    wait_until(lambda: tier.store.has([key_of(0)]) == 1)


def test_blocks_wait_until_it_is_known_how_many_there_are(tier: WritingTier) -> None:
    store = DiskStore(tier.directory)
    writer, outcomes = tier.start(store)
    assert writer.offer(outcomes.put(1)) == ""
    time.sleep(0.3)
    assert outcomes == {}
    store.load()
    wait_until(lambda: outcomes == {1: ""})


def test_a_namespace_is_cleared_before_it_is_known_how_many_blocks_there_are(
    tier: WritingTier,
) -> None:
    tier.put(1)
    tier.put(1, namespace="0b" * HASH_BYTES)
    store = tier.open(load=False)
    writer, _ = tier.start(store)
    writer.clear(NAMESPACE)
    assert tier.there(1) == set()
    writer.close(20)
    assert not tier.path(1).exists()
    store.load()
    assert store.stats().blocks == 1


def test_an_invalid_block_is_dropped_and_the_next_is_written(tier: WritingTier) -> None:
    writer, outcomes = tier.start()
    writer.offer(outcomes.put(1, b"rubbish"))
    writer.offer(outcomes.put(2))
    wait_until(lambda: outcomes.get(2) == "")
    assert "not a block file" in outcomes[1]
    assert writer.drops == 1


def test_closing_ends_within_its_timeout(tier: WritingTier) -> None:
    tier.disk.may_write.clear()
    writer, outcomes = tier.start()
    for number in range(5):
        writer.offer(outcomes.put(number))
    writer.close(0.0)
    tier.disk.may_write.set()
    wait_until(lambda: len(outcomes) == 5)
    assert "shutting down" in outcomes.values()


def test_limits_are_enforced_without_any_put(tier: WritingTier) -> None:
    store = DiskStore(tier.directory, ttl_s=0.5)
    store.load()
    writer, outcomes = tier.start(store, flush_interval_s=0.1)
    writer.offer(outcomes.put(1))
    wait_until(lambda: outcomes == {1: ""})
    wait_until(lambda: store.stats().expired_total == 1)
    writer.close(20)
