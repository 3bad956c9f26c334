"""Pages and snapshots in RAM that are missing in the kvstore, sent as it has room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.plan import STORE_LIMIT, Payload, StoreRoom
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.outputs import Store
from engine.scheduler.pools.page_pool import Storable


class StoreBacklog:
    """Full pages and snapshots to send to the kvstore, in order.

    They take no additional memory: they are in the pools, and are removed from here when
    evicted. ``room`` limits the number in flight, None means no limit. What was not stored is added
    again."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._page_bytes, self._state_bytes = config.page_bytes, config.state_bytes
        self.room: StoreRoom | None = None
        self._waiting: dict[int, Storable] = {}  # by id
        self._exported: dict[int, Storable] = {}  # those whose bytes are being exported, by id

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Storable]:
        return iter(self._waiting.values())

    @property
    def num_exported(self) -> int:
        """Number of those taken whose bytes have not been returned yet."""
        return len(self._exported)

    @property
    def has_next(self) -> bool:
        """Whether `take` would return something."""
        return next(self._fitting(), None) is not None

    def add(self, found: Iterable[Storable]) -> None:
        """Add those of ``found`` that the kvstore does not have."""
        self._waiting.update((one.id, one) for one in found if not one.stored)

    def discard(self, one: Storable) -> bool:
        """Remove ``one`` if it is queued, and return whether it was."""
        return self._waiting.pop(one.id, None) is not None

    def take(self) -> list[Storable]:
        """Remove as many as there is room for. Their bytes will be exported."""
        taken = list(self._fitting())
        for one in taken:
            del self._waiting[one.id]
        self.begin_exports(taken)
        return taken

    def begin_exports(self, taken: Iterable[Storable]) -> None:
        """Expect the bytes of ``taken``, which are exported with the next plan."""
        for one in taken:
            one.stored = True
            self._exported[one.id] = one

    def has_room_for_evicted(self, one: Storable) -> bool:
        """Return whether ``one`` may be exported when it is evicted: what is exported then is in
        no ledger, and the store refuses more anyway."""
        files = len(self._exported) + 1
        return files == 1 or STORE_LIMIT.fits(files, files * self._bytes_of(one))

    def ignore_export(self, block_id: int) -> None:
        """Do not expect the bytes with this id any more, or ignore them."""
        self._exported.pop(block_id, None)

    def ignore_exports(self) -> None:
        """Ignore all bytes that are on their way here, also of what was evicted."""
        for one in self._exported.values():
            one.stored = False
        self._exported.clear()

    def take_exported(self, block_id: int, payload: Payload) -> Store | None:
        """Return the message for the kvstore, None for one after `ignore_export`."""
        one = self._exported.pop(block_id, None)
        return None if one is None else Store(one.hash, payload, one.is_snapshot)

    def clear(self) -> None:
        self._waiting.clear()
        self._exported.clear()

    def _fitting(self) -> Iterator[Storable]:
        """Yield the first ones that there is room for."""
        files = len(self._exported)
        size_bytes = sum(map(self._bytes_of, self._exported.values()))
        for one in self._waiting.values():
            files += 1
            size_bytes += self._bytes_of(one)
            if self.room is not None and not self.room.fits(files, size_bytes):
                return
            yield one

    def _bytes_of(self, one: Storable) -> int:
        return self._state_bytes if one.is_snapshot else self._page_bytes
