from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from kvstore.directory import BlockKey, FileInfo
from kvstore.space import SETTLE_S, DiskSpace
from kvstore.store import BlockTooLarge
from services.processes.kvstore import load_index
from tests.kvstore.blocks import NAMESPACE, file_of, key_of
from tests.kvstore.tier import Tier

SIZE = len(file_of(1))
DAY_S = 86400.0


def test_a_run_ends_at_the_first_gap(tier: Tier) -> None:
    store = tier.store
    tier.put(1, 2, 4)
    keys = [key_of(number) for number in (1, 2, 3, 4)]
    assert store.has(keys) == 2
    assert store.get(keys) == [str(tier.path(1)), str(tier.path(2))]
    assert store.get(keys[::-1]) == [str(tier.path(4))]
    assert store.get([]) == []
    stats = store.stats()
    assert (stats.reads_total, stats.misses_total, stats.blocks) == (3, 2, 3)


def test_a_stored_block_is_not_overwritten(tier: Tier) -> None:
    tier.put(1)
    before = tier.path(1).stat().st_ino
    tier.put(1)
    assert tier.path(1).stat().st_ino == before
    assert tier.store.stats().writes_total == 1


def test_the_size_limit_evicts_what_was_used_least_recently(tier: Tier) -> None:
    store = tier.open(max_bytes=3 * SIZE)
    tier.put(1, 2, 3)
    tier.touch(1)
    store.get([key_of(2)])
    tier.put(4)
    assert tier.there(1, 2, 3, 4) == {1, 2, 4}
    tier.put(5, 6)
    assert tier.there(1, 2, 4, 5, 6) == {4, 5, 6}
    assert store.stats().bytes == 3 * SIZE
    assert store.stats().evicted_total == 3
    assert sum(1 for _ in tier.directory.scan()) == 3


@pytest.mark.parametrize("loaded", [True, False])
def test_a_block_that_is_removed_while_it_is_looked_up_is_not_counted(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    tier.put(1, 2)
    store = tier.open(load=loaded)
    info = tier.directory.info

    def overtaken(key: BlockKey) -> FileInfo | None:
        found = info(key)
        monkeypatch.undo()
        tier.path(1).write_bytes(b"damaged")
        tier.verify(1)
        return found

    monkeypatch.setattr(tier.directory, "info", overtaken)
    tier.touch(1)
    store.load()
    store.clear(key_of(2).namespace)
    assert (store.stats().blocks, store.stats().corrupt_total) == (0, 1)
    assert store.stats().bytes == tier.directory.quarantined_bytes


def test_a_cleared_namespace_has_no_blocks_whose_files_are_gone(tier: Tier) -> None:
    tier.put(1, 2)
    tier.path(1).unlink()
    tier.store.clear(key_of(1).namespace)
    assert (tier.store.stats().blocks, tier.store.stats().bytes) == (0, 0)


@pytest.mark.parametrize("namespace", [NAMESPACE, f"{NAMESPACE}/rank_3"])
def test_blocks_that_are_cleared_during_a_scan_do_not_come_back(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    tier.put(1, 2, namespace=namespace)
    tier.put(3, namespace=f"{NAMESPACE}/rank_4")
    store = tier.open(load=False)
    found = list(tier.directory.scan())
    store.clear(namespace)
    monkeypatch.setattr(tier.directory, "scan", lambda: found)
    store.load()
    assert store.stats().blocks == 1
    monkeypatch.undo()
    assert len(list(tier.directory.scan())) == 1


def test_a_chain_loses_its_end_before_its_start(tier: Tier) -> None:
    tier.open(max_bytes=4 * SIZE)
    tier.put(1, 2, 3, 4)
    tier.touch(1, 2, 3, 4)
    tier.put(5)
    assert tier.there(1, 2, 3, 4, 5) == {1, 2, 3, 5}


def test_the_order_of_use_survives_a_restart(tier: Tier) -> None:
    store = tier.open()
    tier.put(1, 2, 3, 4)
    tier.touch(2, 1)
    for number in (3, 4):
        os.utime(tier.path(number), (tier.now - 10 + number,) * 2)
    store.flush()
    tier.open(max_bytes=2 * SIZE)
    assert tier.there(1, 2, 3, 4) == {1, 2}


def test_an_expired_block_is_not_found_while_indexing_either(tier: Tier) -> None:
    tier.put(1)
    os.utime(tier.path(1), (tier.now - 8 * DAY_S,) * 2)
    store = tier.open(load=False, ttl_s=7 * DAY_S)
    assert tier.there(1) == set()
    store.load()
    store.flush()
    assert store.stats().expired_total == 1
    assert not tier.path(1).exists()


def test_the_store_is_usable_before_its_index_is_complete(tier: Tier) -> None:
    tier.put(1, 2, 3)
    store = tier.open(load=False, max_bytes=3 * SIZE)
    assert store.stats().indexing
    assert store.has([key_of(1), key_of(2), key_of(9)]) == 2
    assert len(store.get([key_of(1)])) == 1
    store.load()
    tier.put(4)
    assert not store.stats().indexing
    assert len(tier.there(2, 3)) == 1  # one of the two not used since the start
    assert tier.there(1, 4) == {1, 4}


@pytest.mark.parametrize("damage", [b"", b"short", file_of(2), file_of(1)[:-1] + b"?"])
def test_a_bad_block_is_quarantined(tier: Tier, damage: bytes) -> None:
    tier.put(1)
    tier.path(1).write_bytes(damage)
    tier.verify(1)
    assert tier.there(1) == set()
    assert tier.store.stats().corrupt_total == 1
    tier.verify(1)
    assert tier.store.stats().corrupt_total == 1
    tier.put(1)
    assert tier.there(1) == {1}


def test_the_directory_may_be_removed_under_the_store(tier: Tier) -> None:
    tier.put(1)
    tier.path(1).unlink()
    tier.path(1).parent.rmdir()
    tier.put(2)
    assert tier.there(1, 2) == {2}


def test_a_clock_that_is_set_right_deletes_nothing(tmp_path: Path) -> None:
    tier = Tier(tmp_path, now=50.0, wall_ahead_s=-50.0)  # without a battery it is 1970
    tier.open(ttl_s=7 * DAY_S)
    tier.put(1, 2, 3)
    tier.wall_ahead_s = 56 * 365 * DAY_S
    tier.touch(1)
    tier.store.flush()
    assert tier.there(1, 2, 3) == {1, 2, 3}
    for _ in range(2):  # again after a restart, which trusts wall time for a day at most
        tier.open(ttl_s=7 * DAY_S)
        assert tier.there(1, 2, 3) == {1, 2, 3}
    tier.now += 6.5 * DAY_S
    tier.touch(1)
    tier.store.flush()
    assert tier.there(1, 2, 3) == {1}
    tier.close()


def test_a_file_that_cannot_be_removed_still_counts(tier: Tier) -> None:
    store = tier.open(max_bytes=3 * SIZE)
    tier.put(1, 2, 3)
    tier.disk.unremovable.add(tier.path(1))
    with pytest.raises(PermissionError):
        tier.put(4)
    assert tier.there(1, 2, 3, 4) == {2, 3}
    assert store.stats().bytes == 3 * SIZE
    tier.put(4)
    assert tier.there(1, 2, 3, 4) == {3, 4}
    assert store.stats().bytes == 3 * SIZE
    tier.disk.unremovable.clear()
    store.flush()
    assert store.stats().bytes == 2 * SIZE
    tier.put(5)
    assert tier.there(3, 4, 5) == {3, 4, 5}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_files_that_cannot_be_removed_do_not_keep_the_rest_of_a_namespace(
    tier: Tier, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tier.store
    tier.put(1, 2, 3)

    def unlink(path: Path) -> None:
        if path == tier.path(1):
            raise OSError(number, "cannot be removed")
        kept(path)

    kept = tier.disk.unlink
    monkeypatch.setattr(tier.disk, "unlink", unlink)
    with pytest.raises(OSError, match="cannot be removed"):
        store.clear(key_of(1).namespace)
    assert tier.there(1, 2, 3) == set()
    assert store.stats().bytes == SIZE
    monkeypatch.undo()
    store.flush()
    assert store.stats().bytes == 0
    assert not tier.path(1).exists()


def test_room_is_made_before_a_block_is_written(tier: Tier) -> None:
    store = tier.open(max_bytes=3 * SIZE)
    clock_bytes, tier.disk.peak_bytes = sum(tier.disk.sizes.values()), 0
    tier.put(*range(9))
    assert tier.disk.peak_bytes <= clock_bytes + 3 * SIZE
    with pytest.raises(BlockTooLarge):
        store.put(key_of(99), file_of(99, 10 * SIZE), durable=False)
    assert tier.there(*range(9)) == {6, 7, 8}  # nothing was evicted in vain


def test_room_is_kept_for_others_while_each_write_evicts_a_block() -> None:
    free_bytes, now = 500, 0.0
    space = DiskSpace(lambda: free_bytes, 0, 100, lambda: now)
    for _ in range(20):
        assert space.shortfall(2) <= 0
        space.removed(2)
        space.written(2)
        now += 1
    free_bytes = 50  # another program has written
    assert space.shortfall(2) >= 100 + 2 - (50 + 2 * SETTLE_S)
    space.removed(200)  # not free yet
    assert space.shortfall(2) <= 0
    now += SETTLE_S
    assert space.shortfall(2) == 52


def test_a_disk_that_is_full_although_it_has_free_space_shrinks_the_tier(tier: Tier) -> None:
    tier.put(*range(10, 20))
    tier.disk.hidden_quota, tier.disk.capacity_bytes = True, sum(tier.disk.sizes.values())
    tier.put(20)
    assert tier.there(*range(10, 21)) == set(range(12, 21))
    tier.put(21)  # within what it took before
    assert tier.there(20, 21) == {20, 21}


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_index_and_files_in_step(tier: Tier, seed: int) -> None:
    rng = random.Random(seed)
    limits = {"max_bytes": 12 * SIZE, "ttl_s": 100.0}
    store = tier.open(load=False, **limits)
    for _ in range(400):
        number = rng.randrange(30)
        match rng.randrange(8):
            case 0 | 1 | 2:
                store.load()
                tier.put(number)
            case 3:
                chain = [key_of(n) for n in range(number, number + 5)]
                assert len(store.get(chain)) <= 5
            case 4:
                tier.path(number).unlink(missing_ok=True)
            case 5:
                if tier.directory.info(key_of(number)):
                    tier.path(number).write_bytes(b"damaged")
                tier.verify(number)
                assert tier.there(number) == set()
            case 6:
                tier.now += rng.uniform(0, 40)
                store.flush()
            case 7 if rng.random() < 0.2:
                store.flush()
                store = tier.open(load=False, **limits)
            case _:
                store.load()
        tier.there(*range(35))  # makes the store notice vanished files
        if not store.stats().indexing:
            files = dict(tier.directory.scan())
            assert store.stats().blocks == len(files)
            blocks_bytes = sum(info.size for info in files.values())
            assert store.stats().bytes == blocks_bytes + tier.directory.quarantined_bytes
            assert store.stats().bytes <= 12 * SIZE


def test_a_pipe_in_place_of_a_block_does_not_block_reads(tier: Tier) -> None:
    tier.put(1)
    tier.path(1).unlink()
    os.mkfifo(tier.path(1))
    tier.verify(1)
    assert tier.store.read(key_of(1)) is None
    assert tier.store.get([key_of(1)]) == []


def test_a_store_without_descriptors_removes_no_good_block(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(1)

    def read(key: BlockKey) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(tier.directory, "read", read)
        tier.verify(1)
    assert tier.there(1) == {1} and tier.store.stats().corrupt_total == 0


def test_an_index_is_not_complete_without_the_blocks_of_a_folder_that_could_not_be_read(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(1, 2)
    scan, failures = os.scandir, [1, 2]

    def fails(path: str) -> Any:
        if failures and Path(path) == tier.path(2).parent:
            raise OSError(errno.EMFILE, "Too many open files", failures.pop())
        return scan(path)

    monkeypatch.setattr(os, "scandir", fails)
    monkeypatch.setattr("services.processes.kvstore._LOAD_AGAIN_S", 0.0)
    store = tier.open(load=False)
    with pytest.raises(OSError, match="Too many"):
        store.load()
    assert not store.is_loaded and tier.there(1, 2) == {1, 2}
    load_index(store)
    assert store.is_loaded and store.stats().blocks == 2 and not failures
