from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.clock import StoreClock
from kvstore.directory import BlockDirectory, BlockKey
from kvstore.store import BlockTooLarge, DiskStore
from services.processes.kvstore import load_index
from shared.blockfile import BlockFileError
from tests.kvstore.blocks import file_of, key_of
from tests.kvstore.faulty_disk import FaultyDisk

SIZE = len(file_of(1))
DAY_S = 86400.0


class Clock:
    """Wall time and monotonic time at once."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[BlockDirectory]:
    directory = BlockDirectory(tmp_path)
    yield directory
    directory.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def loaded(
    directory: BlockDirectory, *, max_bytes: int = 0, ttl_s: float = 0.0, clock: Clock | None = None
) -> DiskStore:
    ages = StoreClock(wall=clock, monotonic=clock) if clock else None
    store = DiskStore(directory, max_bytes=max_bytes, ttl_s=ttl_s, clock=ages)
    store.load()
    store.flush()
    return store


def put(store: DiskStore, *numbers: int) -> None:
    for number in numbers:
        store.put(key_of(number), file_of(number), durable=False)


def there(store: DiskStore, *numbers: int) -> set[int]:
    return {number for number in numbers if store.has([key_of(number)])}


def test_a_run_ends_at_the_first_gap(directory: BlockDirectory) -> None:
    store = loaded(directory)
    put(store, 1, 2, 4)
    keys = [key_of(number) for number in (1, 2, 3, 4)]
    assert store.has(keys) == 2
    assert store.get(keys) == [str(directory.path(key_of(1))), str(directory.path(key_of(2)))]
    assert store.get(keys[::-1]) == [str(directory.path(key_of(4)))]
    assert store.get([]) == []
    stats = store.stats()
    assert (stats.reads_total, stats.misses_total, stats.blocks) == (3, 2, 3)


def test_a_file_of_another_block_is_not_stored(directory: BlockDirectory) -> None:
    store = loaded(directory)
    with pytest.raises(BlockFileError):
        store.put(key_of(1), file_of(2), durable=False)
    with pytest.raises(BlockFileError):
        store.put(key_of(1), b"", durable=False)
    assert there(store, 1, 2) == set()


def test_a_stored_block_is_not_overwritten(directory: BlockDirectory) -> None:
    store = loaded(directory)
    put(store, 1)
    before = directory.path(key_of(1)).stat().st_ino
    put(store, 1)
    assert directory.path(key_of(1)).stat().st_ino == before
    assert store.stats().writes_total == 1


def test_the_size_limit_evicts_what_was_used_least_recently(
    directory: BlockDirectory, clock: Clock
) -> None:
    store = loaded(directory, max_bytes=3 * SIZE, clock=clock)
    put(store, 1, 2, 3)
    store.touch([key_of(1)])
    store.get([key_of(2)])
    put(store, 4)
    assert there(store, 1, 2, 3, 4) == {1, 2, 4}
    put(store, 5, 6)
    assert there(store, 1, 2, 4, 5, 6) == {4, 5, 6}
    assert store.stats().bytes == 3 * SIZE
    assert store.stats().evicted_total == 3
    assert sum(1 for _ in directory.scan()) == 3


def test_a_chain_loses_its_end_before_its_start(directory: BlockDirectory, clock: Clock) -> None:
    store = loaded(directory, max_bytes=4 * SIZE, clock=clock)
    put(store, 1, 2, 3, 4)
    store.touch([key_of(number) for number in (1, 2, 3, 4)])
    put(store, 5)
    assert there(store, 1, 2, 3, 4, 5) == {1, 2, 3, 5}


def test_the_order_of_use_survives_a_restart(directory: BlockDirectory, clock: Clock) -> None:
    store = loaded(directory, clock=clock)
    put(store, 1, 2, 3, 4)
    store.touch([key_of(number) for number in (2, 1)])
    for number in (3, 4):
        os.utime(directory.path(key_of(number)), (clock.now - 10 + number,) * 2)
    store.flush()
    again = loaded(directory, max_bytes=2 * SIZE, clock=clock)
    assert there(again, 1, 2, 3, 4) == {1, 2}


def test_blocks_unused_for_the_ttl_expire(directory: BlockDirectory, clock: Clock) -> None:
    store = loaded(directory, ttl_s=7 * DAY_S, clock=clock)
    put(store, 1, 2)
    clock.now += 4 * DAY_S
    store.touch([key_of(2)])
    clock.now += 4 * DAY_S
    store.flush()
    assert there(store, 1, 2) == {2}
    assert store.stats().expired_total == 1
    assert not directory.path(key_of(1)).exists()


def test_an_expired_block_is_not_found_while_indexing_either(
    directory: BlockDirectory, clock: Clock
) -> None:
    put(loaded(directory, clock=clock), 1)
    os.utime(directory.path(key_of(1)), (clock.now - 8 * DAY_S,) * 2)
    store = DiskStore(directory, ttl_s=7 * DAY_S, clock=StoreClock(wall=clock, monotonic=clock))
    assert there(store, 1) == set()
    store.load()
    store.flush()
    assert store.stats().expired_total == 1
    assert not directory.path(key_of(1)).exists()


def test_the_store_is_usable_before_its_index_is_complete(
    directory: BlockDirectory, clock: Clock
) -> None:
    put(loaded(directory, clock=clock), 1, 2, 3)
    store = DiskStore(directory, max_bytes=3 * SIZE, clock=StoreClock(wall=clock, monotonic=clock))
    assert store.stats().indexing
    assert store.has([key_of(1), key_of(2), key_of(9)]) == 2
    assert len(store.get([key_of(1)])) == 1
    store.load()
    put(store, 4)
    assert not store.stats().indexing
    assert len(there(store, 2, 3)) == 1  # one of the two not used since the start
    assert there(store, 1, 4) == {1, 4}


def test_a_file_that_vanished_is_a_miss_and_forgotten(directory: BlockDirectory) -> None:
    store = loaded(directory)
    put(store, 1)
    directory.path(key_of(1)).unlink()
    assert store.get([key_of(1)]) == []
    assert store.stats().blocks == 0 and store.stats().bytes == 0
    put(store, 1)
    assert there(store, 1) == {1}


@pytest.mark.parametrize("damage", [b"", b"short", file_of(2), file_of(1)[:-1] + b"?"])
def test_a_bad_block_is_quarantined(directory: BlockDirectory, damage: bytes) -> None:
    store = loaded(directory)
    put(store, 1)
    directory.path(key_of(1)).write_bytes(damage)
    store.verify(key_of(1))
    assert there(store, 1) == set()
    assert store.stats().corrupt_total == 1
    store.verify(key_of(1))
    assert store.stats().corrupt_total == 1
    put(store, 1)
    assert there(store, 1) == {1}


def test_a_good_block_survives_a_false_report(directory: BlockDirectory) -> None:
    store = loaded(directory)
    put(store, 1)
    store.verify(key_of(1))
    assert there(store, 1) == {1}
    assert store.stats().corrupt_total == 0


def test_the_directory_may_be_removed_under_the_store(directory: BlockDirectory) -> None:
    store = loaded(directory)
    put(store, 1)
    directory.path(key_of(1)).unlink()
    directory.path(key_of(1)).parent.rmdir()
    put(store, 2)
    assert there(store, 1, 2) == {2}


def test_a_clock_that_is_set_right_deletes_nothing(tmp_path: Path) -> None:
    wall, monotonic = Clock(), Clock()
    wall.now, monotonic.now = 0.0, 50.0  # a machine without a battery thinks that it is 1970

    def open_store() -> tuple[BlockDirectory, DiskStore]:
        directory = BlockDirectory(tmp_path)
        clock = StoreClock(directory.read_clock(), wall, monotonic)
        store = DiskStore(directory, ttl_s=7 * DAY_S, clock=clock)
        store.load()
        store.flush()
        return directory, store

    directory, store = open_store()
    put(store, 1, 2, 3)
    wall.now = 56 * 365 * DAY_S
    store.touch([key_of(1)])
    store.flush()
    assert there(store, 1, 2, 3) == {1, 2, 3}
    for _ in range(2):  # again after a restart, which trusts wall time for a day at most
        directory.close()
        directory, store = open_store()
        assert there(store, 1, 2, 3) == {1, 2, 3}
    monotonic.now += 6.5 * DAY_S
    store.touch([key_of(1)])
    store.flush()
    assert there(store, 1, 2, 3) == {1}
    directory.close()


def test_a_file_that_cannot_be_removed_still_counts(tmp_path: Path) -> None:
    disk = FaultyDisk()
    directory = BlockDirectory(tmp_path, disk)
    store = loaded(directory, max_bytes=3 * SIZE)
    put(store, 1, 2, 3)
    disk.unremovable.add(directory.path(key_of(1)))
    with pytest.raises(PermissionError):
        put(store, 4)
    assert there(store, 1, 2, 3, 4) == {2, 3}
    assert store.stats().bytes == 3 * SIZE
    put(store, 4)
    assert there(store, 1, 2, 3, 4) == {3, 4}
    assert store.stats().bytes == 3 * SIZE
    disk.unremovable.clear()
    store.flush()
    assert store.stats().bytes == 2 * SIZE
    put(store, 5)
    assert there(store, 3, 4, 5) == {3, 4, 5}
    directory.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_files_that_cannot_be_removed_do_not_keep_the_rest_of_a_namespace(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    directory = BlockDirectory(tmp_path, disk)
    store = loaded(directory)
    put(store, 1, 2, 3)

    def unlink(path: Path) -> None:
        if path == directory.path(key_of(1)):
            raise OSError(number, "cannot be removed")
        kept(path)

    kept = disk.unlink
    monkeypatch.setattr(disk, "unlink", unlink)
    with pytest.raises(OSError, match="cannot be removed"):
        store.clear(key_of(1).namespace)
    assert there(store, 1, 2, 3) == set()
    assert store.stats().bytes == SIZE
    monkeypatch.undo()
    store.flush()
    assert store.stats().bytes == 0
    assert not directory.path(key_of(1)).exists()
    directory.close()


def test_room_is_made_before_a_block_is_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    directory = BlockDirectory(tmp_path, disk)
    store = loaded(directory, max_bytes=3 * SIZE)
    clock_bytes, disk.peak_bytes = sum(disk.sizes.values()), 0
    put(store, *range(9))
    assert disk.peak_bytes <= clock_bytes + 3 * SIZE
    with pytest.raises(BlockTooLarge):
        store.put(key_of(99), file_of(99, 10 * SIZE), durable=False)
    assert there(store, *range(9)) == {6, 7, 8}  # nothing was evicted in vain
    directory.close()


def test_a_disk_that_is_full_although_it_has_free_space_shrinks_the_tier(tmp_path: Path) -> None:
    disk = FaultyDisk()
    directory = BlockDirectory(tmp_path, disk)
    store = loaded(directory)
    put(store, *range(10, 20))
    disk.hidden_quota, disk.capacity_bytes = True, sum(disk.sizes.values())
    put(store, 20)
    assert there(store, *range(10, 21)) == set(range(12, 21))
    put(store, 21)  # within what it took before
    assert there(store, 20, 21) == {20, 21}
    directory.close()


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_index_and_files_in_step(
    directory: BlockDirectory, clock: Clock, seed: int
) -> None:
    rng = random.Random(seed)
    ages = StoreClock(wall=clock, monotonic=clock)
    make_store = partial(DiskStore, directory, max_bytes=12 * SIZE, ttl_s=100.0, clock=ages)
    store = make_store()
    for _ in range(400):
        number = rng.randrange(30)
        match rng.randrange(8):
            case 0 | 1 | 2:
                store.load()
                put(store, number)
            case 3:
                chain = [key_of(n) for n in range(number, number + 5)]
                assert len(store.get(chain)) <= 5
            case 4:
                directory.path(key_of(number)).unlink(missing_ok=True)
            case 5:
                if directory.info(key_of(number)):
                    directory.path(key_of(number)).write_bytes(b"damaged")
                store.verify(key_of(number))
                assert there(store, number) == set()
            case 6:
                clock.now += rng.uniform(0, 40)
                store.flush()
            case 7 if rng.random() < 0.2:
                store.flush()
                store = make_store()
            case _:
                store.load()
        there(store, *range(35))  # makes the store notice vanished files
        if not store.stats().indexing:
            files = dict(directory.scan())
            assert store.stats().blocks == len(files)
            blocks_bytes = sum(info.size for info in files.values())
            assert store.stats().bytes == blocks_bytes + directory.quarantined_bytes
            assert store.stats().bytes <= 12 * SIZE


def test_a_pipe_in_place_of_a_block_does_not_block_reads(directory: BlockDirectory) -> None:
    store = loaded(directory)
    put(store, 1)
    directory.path(key_of(1)).unlink()
    os.mkfifo(directory.path(key_of(1)))
    store.verify(key_of(1))
    assert store.read(key_of(1)) is None
    assert store.get([key_of(1)]) == []


def test_a_store_without_descriptors_removes_no_good_block(
    directory: BlockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = loaded(directory)
    put(store, 1)

    def read(key: BlockKey) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(directory, "read", read)
        store.verify(key_of(1))
    assert there(store, 1) == {1} and store.stats().corrupt_total == 0


def test_an_index_is_not_complete_without_the_blocks_of_a_folder_that_could_not_be_read(
    directory: BlockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(loaded(directory), 1, 2)
    scan, failures = os.scandir, [1, 2]

    def fails(path: str) -> Any:
        if failures and Path(path) == directory.path(key_of(2)).parent:
            raise OSError(errno.EMFILE, "Too many open files", failures.pop())
        return scan(path)

    monkeypatch.setattr(os, "scandir", fails)
    monkeypatch.setattr("services.processes.kvstore._LOAD_AGAIN_S", 0.0)
    store = DiskStore(directory)
    with pytest.raises(OSError, match="Too many"):
        store.load()
    assert not store.is_loaded and there(store, 1, 2) == {1, 2}
    load_index(store)
    assert store.is_loaded and store.stats().blocks == 2 and not failures
