"""Blocks and snapshots in RAM that are missing in the kvstore, sent as it has room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.plan import STORE_LIMIT, Payload, StoreRoom
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.outputs import Store
from engine.scheduler.pools.block_pool import Block


class StoreBacklog:
    """Blocks and snapshots to send to the kvstore, in order.

    They take no additional memory: they are in the pools, and are removed from here when
    evicted. ``room`` limits the number in flight, None means no limit. A block that was not
    stored is added again."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_bytes, self._state_bytes = config.block_bytes, config.state_bytes
        self.room: StoreRoom | None = None
        self._waiting: dict[int, Block] = {}  # by id
        self._exported: dict[int, Block] = {}  # blocks whose bytes are being exported, by id

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._waiting.values())

    @property
    def num_exported(self) -> int:
        """Number of blocks taken whose bytes have not been returned yet."""
        return len(self._exported)

    @property
    def has_next(self) -> bool:
        """Whether `take` would return something."""
        return next(self._fitting(), None) is not None

    def add(self, blocks: Iterable[Block]) -> None:
        """Add those of ``blocks`` that the kvstore does not have."""
        self._waiting.update((block.id, block) for block in blocks if not block.stored)

    def discard(self, block: Block) -> bool:
        """Remove ``block`` if it is queued, and return whether it was."""
        return self._waiting.pop(block.id, None) is not None

    def take(self) -> list[Block]:
        """Remove as many as there is room for. Their bytes will be exported."""
        taken = list(self._fitting())
        for block in taken:
            del self._waiting[block.id]
        self.exporting(taken)
        return taken

    def exporting(self, blocks: Iterable[Block]) -> None:
        """Expect the bytes of ``blocks``."""
        for block in blocks:
            block.stored = True
            self._exported[block.id] = block

    def has_room_for_evicted(self, block: Block) -> bool:
        """Return whether ``block`` may be exported when it is evicted: what is exported then is in
        no ledger, and the store refuses more anyway."""
        files = len(self._exported) + 1
        return files == 1 or STORE_LIMIT.fits(files, files * self._bytes_of(block))

    def lost(self, block_id: int) -> None:
        """Do not expect the bytes of a block any more, or ignore them."""
        self._exported.pop(block_id, None)

    def lose_exported(self) -> None:
        """Ignore all bytes that are on their way here, also those of evicted blocks."""
        for block in self._exported.values():
            block.stored = False
        self._exported.clear()

    def came_back(self, block_id: int, payload: Payload) -> Store | None:
        """Return the message for the kvstore, None for a block that is `lost`."""
        block = self._exported.pop(block_id, None)
        return None if block is None else Store(block.hash, payload, block.is_snapshot)

    def clear(self) -> None:
        self._waiting.clear()
        self._exported.clear()

    def _fitting(self) -> Iterator[Block]:
        """Yield the first blocks that there is room for."""
        files = len(self._exported)
        size_bytes = sum(map(self._bytes_of, self._exported.values()))
        for block in self._waiting.values():
            files += 1
            size_bytes += self._bytes_of(block)
            if self.room is not None and not self.room.fits(files, size_bytes):
                return
            yield block

    def _bytes_of(self, block: Block) -> int:
        return self._state_bytes if block.is_snapshot else self._block_bytes
