"""The pool of snapshots: recurrent state at block boundaries, from which prefill can continue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from engine.scheduler.pools.block_pool import Block, BlockPool
from shared.hashing import HASH_BYTES


class SnapshotPool(BlockPool):
    """At most ``limit`` snapshots, each by the hash of the last block of its prefix.

    An unpublished snapshot has a private name, which is not any block's hash. It can be evicted
    like the others.
    """

    _of_snapshots = True

    def __init__(self, limit: int, clock: count[int] | None = None) -> None:
        super().__init__(clock)
        self._limit = limit

    @property
    def full(self) -> bool:
        return len(self) >= self._limit

    def add_private(self) -> Block:
        """Add a snapshot, pinned once, without a hash: `publish` sets it."""
        return self.add(b"private snapshot %d" % next(self._clock))

    def holds(self, snapshot: Block) -> bool:
        return self.get(snapshot.hash) is snapshot

    def publish(self, snapshot: Block, block_hash: bytes) -> bool:
        """Publish ``snapshot`` under ``block_hash``. Return False if there already is one."""
        if block_hash in self:
            return False
        self.pin(snapshot)
        self.remove(snapshot)
        snapshot.hash = block_hash
        self._put(snapshot)
        self.unpin(snapshot)
        return True

    def is_published(self, snapshot: Block) -> bool:
        return _is_block_hash(snapshot.hash)

    def published_hashes(self) -> list[bytes]:
        return [snapshot.hash for snapshot in self if _is_block_hash(snapshot.hash)]

    def longest_prefix(self, hashes: Sequence[bytes], first: int, end: int) -> int:
        """Return the largest number of blocks, above ``first`` and up to ``end``, after which
        there is a snapshot; ``first`` if there is none."""
        if self._index.keys().isdisjoint(hashes[first:end]):  # usually; much faster than the loop
            return first
        return next(number for number in range(end, first, -1) if hashes[number - 1] in self)

    def _record_change(self, block_hash: bytes, *, added: bool) -> None:
        if _is_block_hash(block_hash):
            super()._record_change(block_hash, added=added)


def _is_block_hash(key: bytes) -> bool:
    return len(key) == HASH_BYTES
