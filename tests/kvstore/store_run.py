"""Random operations on a store whose disk fails in every way: `python -m tests.kvstore.store_run`.

Writes are cut, bits flip, the disk fills up, and the process is killed in any system call, with
and without the power. What must hold: no wrong byte is ever read, the files never take more than
the limit and one block, and no block that was acknowledged as persistent is lost, unless a limit
made it go. A run is repeated by its seed.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.clock import StoreClock
from kvstore.directory import BlockDirectory
from kvstore.health import DiskHealth
from kvstore.store import BlockTooLarge, DiskStore
from shared.blockfile import BlockFileError, decode
from tests.kvstore.blocks import NAMESPACE, file_of, hash_of, key_of, payload_of
from tests.kvstore.faulty_disk import FaultyDisk, Killed

BLOCKS = 60
SIZES = (300, 1000, 2500)
LARGEST = len(file_of(0, max(SIZES)))
BESIDES = 1000
"""Bytes of the files that hold no block: the clock and its next version."""


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


class StoreRun:
    """A store under random operations, and what is known of it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.root = root / "blocks"
        self.disk = FaultyDisk(self.rng)
        self.max_bytes = self.rng.choice((0, 5 * LARGEST, 20 * LARGEST))
        self.reserve_bytes = self.rng.choice((0, 2 * LARGEST))
        self.ttl_s = self.rng.choice((0.0, 500.0))
        self.now = 1_000_000.0
        self.acknowledged: set[int] = set()
        """Blocks that must be there, unless a limit made them go."""
        self.spoiled: set[int] = set()
        """Blocks whose files may be bad: the run damaged them, or they were not synced."""
        self.had_limits = bool(self.max_bytes or self.ttl_s)
        self.kills = self.reads = self.lost_to_limits = 0
        self.open()

    def open(self) -> None:
        self.directory = BlockDirectory(self.root, self.disk)
        clock = StoreClock(self.directory.read_clock(), wall=self._time, monotonic=self._time)
        self.store = DiskStore(
            self.directory,
            max_bytes=self.max_bytes,
            reserve_bytes=self.reserve_bytes,
            ttl_s=self.ttl_s,
            clock=clock,
        )
        self.store.health = DiskHealth(self._time)
        self.store._space._clock = self._time
        self.store.load()

    def run(self, operations: int) -> None:
        """Raises: AssertionError if something that must hold does not."""
        steps: list[tuple[int, Callable[[], None]]] = [
            (30, self.put),
            (20, self.get),
            (8, self.flush),
            (4, self.verify),
            (3, self.damage),
            (3, self.break_disk),
            (3, self.mend_disk),
            (3, self.fill_disk),
            (4, self.plan_kill),
            (2, self.restart),
        ]
        weights, actions = zip(*steps, strict=True)
        for _ in range(operations):
            self.now += self.rng.choice((0.0, 0.5, 20.0))
            try:
                self.rng.choices(actions, weights)[0]()
            except Killed:
                self.come_back()
            self.check()
        self.mend_disk()
        self.come_back(lose_power=True)
        self.check()
        self.directory.close()

    # -- operations ------------------------------------------------------------

    def put(self) -> None:
        number, durable = self.rng.randrange(BLOCKS), self.rng.random() < 0.5
        was_there = self.store.has([key_of(number)]) == 1
        try:
            self.store.put(key_of(number), file_of(number, size_of(number)), durable)
        except (OSError, BlockTooLarge) as error:
            if isinstance(error, OSError):
                self.store.health.failed(error)
            return
        if not was_there:
            self.spoiled.discard(number)
        if durable and number not in self.spoiled:
            self.acknowledged.add(number)

    def get(self) -> None:
        first = self.rng.randrange(BLOCKS)
        numbers = range(first, first + 4)
        for number, path in zip(
            numbers, self.store.get([key_of(n) for n in numbers]), strict=False
        ):
            self.read(number, Path(path))

    def read(self, number: int, path: Path) -> None:
        """Read a block as an engine does: what is accepted must be right."""
        self.reads += 1
        try:
            payload = decode(path.read_bytes(), hash_of(number), NAMESPACE)
        except BlockFileError:
            assert number in self.spoiled, f"block {number} is bad"
            self.check_file(number)
            return
        assert payload == payload_of(number, size_of(number)), f"block {number} is wrong"

    def flush(self) -> None:
        self.store.flush()

    def verify(self) -> None:
        self.check_file(self.rng.randrange(BLOCKS))

    def check_file(self, number: int) -> None:
        try:
            self.store.verify(key_of(number))
        except OSError as error:
            self.store.health.failed(error)

    def damage(self) -> None:
        """Flip a bit of a file, or cut it."""
        number = self.rng.randrange(BLOCKS)
        path = self.directory.path(key_of(number))
        if not path.exists():
            return
        data = bytearray(path.read_bytes())
        if data and self.rng.random() < 0.5:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        else:
            del data[self.rng.randrange(len(data) + 1) :]
        used = path.stat()
        path.write_bytes(data)
        os.utime(path, (used.st_atime, used.st_mtime))
        self.disk.sizes[path] = len(data)
        self.spoiled.add(number)
        self.acknowledged.discard(number)

    def break_disk(self) -> None:
        code = self.rng.choice((errno.EIO, errno.EROFS, errno.ENOSPC))
        if self.rng.random() < 0.5:
            self.disk.always = OSError(code, "it fails")
        else:
            self.disk.unremovable.add(self.directory.path(key_of(self.rng.randrange(BLOCKS))))

    def mend_disk(self) -> None:
        self.disk.always = None
        self.disk.unremovable.clear()
        self.disk.capacity_bytes = None

    def fill_disk(self) -> None:
        """Leave little room, or say that there is some where there is none."""
        self.had_limits = True
        self.disk.hidden_quota = self.rng.random() < 0.3
        used_bytes = sum(self.disk.sizes.values())
        self.disk.capacity_bytes = used_bytes + self.rng.randrange(4 * LARGEST)

    def plan_kill(self) -> None:
        self.disk.kill_after = self.rng.randrange(12)

    def restart(self) -> None:
        self.come_back()

    def come_back(self, lose_power: bool | None = None) -> None:
        """Begin again after a kill, perhaps one of the power."""
        os.close(self.directory._lock)
        self.kills += 1
        if self.rng.random() < 0.5 if lose_power is None else lose_power:
            self.disk.lose_power()
            self.spoiled |= set(range(BLOCKS)) - self.acknowledged
        self.disk.always, self.disk.unremovable = None, set()  # it would not start
        self.disk.restart()
        self.open()

    # -- what must hold --------------------------------------------------------

    def check(self) -> None:
        if self.max_bytes:
            assert self.disk.peak_bytes <= self.max_bytes + LARGEST + BESIDES, "over the limit"
        if self.max_bytes and self.rng.random() < 0.05:
            files = self.root.rglob("*.safetensors")
            assert sum(path.stat().st_size for path in files) <= self.max_bytes + LARGEST
        for number in list(self.acknowledged):
            path = self.directory.path(key_of(number))
            if path.exists():
                payload = decode(path.read_bytes(), hash_of(number), NAMESPACE)
                assert payload == payload_of(number, size_of(number))
            else:
                assert self.had_limits, f"block {number} was acknowledged, and is lost"
                assert path in self.disk.removed, f"block {number} was lost, and not evicted"
                self.lost_to_limits += 1
                self.acknowledged.discard(number)
        self.disk.removed.clear()

    def _time(self) -> float:
        return self.now


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kvstore.store_run", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--operations", type=int, default=1000, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args()
    started = time.monotonic()
    kills = reads = lost = 0
    for seed in range(options.seed, options.seed + options.runs):
        with tempfile.TemporaryDirectory() as root:
            run = StoreRun(Path(root), seed)
            try:
                run.run(options.operations)
            except BaseException:
                print(f"failed with --seed {seed} --runs 1 --operations {options.operations}")
                raise
        kills, reads, lost = kills + run.kills, reads + run.reads, lost + run.lost_to_limits
    took_s = time.monotonic() - started
    print(
        f"{options.runs * options.operations} operations in {took_s:.0f} s: {kills} kills, {reads} "
        f"reads without a wrong byte, {lost} acknowledged blocks evicted by limits, none lost"
    )


if __name__ == "__main__":
    main()
