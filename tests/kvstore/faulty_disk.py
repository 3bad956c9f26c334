"""A disk that can be slow, full, faulty, or without power: real files, and faults on top."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path

from kvstore.disk import Disk


class Killed(BaseException):
    """The process was killed in this system call; nothing that it does later happens."""


class FaultyDisk(Disk):
    """Fails as told, and knows what a power loss would leave. So nothing is really synced: beside
    other tests that can take seconds each time.

    ``capacity_bytes`` limits the files that this disk wrote, besides ``foreign_bytes`` of others.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng or random.Random(0)
        self.may_write = threading.Event()
        self.may_write.set()
        self.errors: list[OSError] = []
        """What the next writes raise, the last one first."""
        self.always: OSError | None = None
        """What all other writes, renames and removals raise."""
        self.unremovable: set[Path] = set()
        self.attempts = 0
        self.capacity_bytes: int | None = None
        self.hidden_quota = False
        """Whether the free space that the disk tells of is not to be had."""
        self.foreign_bytes = 0
        self.peak_bytes = 0
        self.kill_after: int | None = None
        """Number of system calls after which the process is killed."""
        self.sizes: dict[Path, int] = {}
        self._unsynced_content: set[Path] = set()
        self._unsynced_names: set[Path] = set()
        self.removed: set[Path] = set()

    def create(self, path: Path, data: bytes, last_used: float, durable: bool) -> None:
        assert self.may_write.wait(30)
        self.attempts += 1
        if self.errors:
            raise self.errors.pop()
        killed = self._is_killed()
        self._fail()
        room = self._room()
        if killed or room < len(data):
            cut = self.rng.randrange(len(data) + 1) if killed else min(room, len(data))
            super().create(path, data[:cut], last_used, durable=False)
            self._wrote(path, cut, durable=False)
            if killed:
                raise Killed
            raise OSError(errno.ENOSPC, "no space left")
        super().create(path, data, last_used, durable=False)
        self._wrote(path, len(data), durable)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)
        self.sizes[target] = self.sizes.pop(source, 0)
        self._unsynced_names.add(target)
        if source in self._unsynced_content:
            self._unsynced_content.remove(source)
            self._unsynced_content.add(target)
        else:
            self._unsynced_content.discard(target)

    def unlink(self, path: Path) -> None:
        self._step()
        if path in self.unremovable:
            raise PermissionError(errno.EPERM, "not permitted")
        super().unlink(path)
        self.sizes.pop(path, None)
        self._unsynced_content.discard(path)
        self.removed.add(path)

    def set_last_used(self, path: Path, at: float) -> None:
        self._step()
        super().set_last_used(path, at)

    def sync_file(self, path: Path) -> None:
        self._step()
        path.stat()
        self._unsynced_content.discard(path)

    def sync_folder(self, path: Path) -> None:
        self._step()
        path.stat()
        # The names of files are in the folder; that a new folder's own name must be synced too is
        # not modelled.
        self._unsynced_names = {name for name in self._unsynced_names if name.parent != path}

    def free_bytes(self, path: Path) -> int:
        if self.capacity_bytes is None or self.hidden_quota:
            return 10**15
        return max(0, self._room())

    def lose_power(self) -> None:
        """Lose what was not synced: names, and the ends of files."""
        # In a fixed order, so that a run can be repeated by its seed.
        for path in sorted(self._unsynced_names):
            if self.rng.random() < 0.5:
                path.unlink(missing_ok=True)
        for path in sorted(self._unsynced_content):
            if path.exists():
                data = path.read_bytes()
                path.write_bytes(data[: self.rng.randrange(len(data) + 1)])
        self._unsynced_content.clear()
        self._unsynced_names.clear()

    def restart(self) -> None:
        """Forget what a killed process left; the next one may use the disk."""
        self.kill_after = None
        self.sizes = {path: path.stat().st_size for path in self.sizes if path.exists()}

    def _room(self) -> int:
        if self.capacity_bytes is None:
            return 10**15
        return self.capacity_bytes - self.foreign_bytes - sum(self.sizes.values())

    def _wrote(self, path: Path, size: int, durable: bool) -> None:
        self.sizes[path] = size
        self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))
        self._unsynced_content.discard(path)
        if not durable:
            self._unsynced_content.add(path)

    def _step(self) -> None:
        if self._is_killed():
            raise Killed
        self._fail()

    def _fail(self) -> None:
        if self.always is not None:
            raise self.always

    def _is_killed(self) -> bool:
        if self.kill_after is None:
            return False
        self.kill_after -= 1
        return self.kill_after < 0
