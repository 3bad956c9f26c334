"""A store on a disk that fails as told, at a time that tests set."""

from __future__ import annotations

from pathlib import Path

from kvstore.clock import StoreClock
from kvstore.directory import BlockDirectory
from kvstore.store import DiskStore
from tests.kvstore.blocks import NAMESPACE, file_of, key_of
from tests.kvstore.faulty_disk import FaultyDisk


class Tier:
    def __init__(self, root: Path, now: float = 1_000_000.0, wall_ahead_s: float = 0.0) -> None:
        """The wall's clock is ``wall_ahead_s`` ahead of the monotonic one."""
        self.now, self.wall_ahead_s = now, wall_ahead_s
        self.disk = FaultyDisk()
        self.directory = BlockDirectory(root, self.disk)
        self.store = self.open()

    def open(self, *, load: bool = True, **limits: float) -> DiskStore:
        """Make another store with these limits of `DiskStore`, as after a restart."""
        clock = StoreClock(self.directory.read_clock(), self._wall, self._monotonic)
        self.store = DiskStore(self.directory, clock=clock, **limits)  # type: ignore[arg-type]
        if load:
            self.store.load()
            self.store.flush()  # the first one saves the clock
        return self.store

    def put(self, *numbers: int, namespace: str = NAMESPACE) -> None:
        for number in numbers:
            file = file_of(number, namespace=namespace)
            self.store.put(key_of(number, namespace), file, durable=False)

    def verify(self, number: int) -> None:
        self.store.verify(key_of(number))

    def touch(self, *numbers: int) -> None:
        self.store.touch([key_of(number) for number in numbers])

    def there(self, *numbers: int, namespace: str = NAMESPACE) -> set[int]:
        return {number for number in numbers if self.store.has([key_of(number, namespace)])}

    def path(self, number: int) -> Path:
        return self.directory.path(key_of(number))

    def close(self) -> None:
        self.directory.close()

    def _monotonic(self) -> float:
        self.now += 0.001
        return self.now

    def _wall(self) -> float:
        return self._monotonic() + self.wall_ahead_s
