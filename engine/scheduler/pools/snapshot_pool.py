"""The pool of snapshots: recurrent state after some blocks, from which prefill can continue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from engine.scheduler.pools.page_pool import NetChanges, Storable
from shared.hashing import HASH_BYTES


@dataclass(eq=False, slots=True)
class Snapshot(Storable):
    """The recurrent state at the end of the prefix with this hash."""

    pins: int = 1  # operations in flight that use it
    last_used: int = 0  # time of its last use, by the pools' clock

    @property
    def is_snapshot(self) -> bool:
        return True


class SnapshotPool:
    """At most ``limit`` snapshots, each by the hash of the last block of its prefix. One without
    references in flight is evictable, least recently used first.

    An unpublished snapshot has a private name, which is not any block's hash. It can be evicted
    like the others.
    """

    def __init__(self, limit: int, clock: count[int] | None = None) -> None:
        self._limit = limit
        self._index: dict[bytes, Snapshot] = {}
        self._evictable: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._changes = NetChanges()
        self._clock = count() if clock is None else clock

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._index.values())

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._index

    @property
    def full(self) -> bool:
        return len(self) >= self._limit

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def get(self, block_hash: bytes) -> Snapshot | None:
        return self._index.get(block_hash)

    def add(self, block_hash: bytes, *, stored: bool = False) -> Snapshot:
        """Add a snapshot, pinned once. Raises: ValueError if its hash is in the pool."""
        if block_hash in self._index:
            raise ValueError("this snapshot is already in the pool")
        snapshot = Snapshot(next(self._clock), block_hash, stored)
        self._put(snapshot)
        return snapshot

    def add_private(self) -> Snapshot:
        """Add a snapshot, pinned once, without a hash: `publish` sets it."""
        return self.add(b"private snapshot %d" % next(self._clock))

    def pin(self, snapshot: Snapshot) -> None:
        snapshot.pins += 1
        self._evictable.pop(snapshot.hash, None)

    def unpin(self, snapshot: Snapshot) -> None:
        """Undo one `pin`. The last one makes ``snapshot`` evictable, as the most recently used."""
        snapshot.pins -= 1
        if not snapshot.pins and self.holds(snapshot):
            self._evictable[snapshot.hash] = snapshot
            snapshot.last_used = next(self._clock)

    def holds(self, snapshot: Snapshot) -> bool:
        return self.get(snapshot.hash) is snapshot

    def publish(self, snapshot: Snapshot, block_hash: bytes) -> bool:
        """Publish ``snapshot`` under ``block_hash``. Return False if there already is one."""
        if block_hash in self:
            return False
        self.pin(snapshot)
        self.remove(snapshot)
        snapshot.hash = block_hash
        self._put(snapshot)
        self.unpin(snapshot)
        return True

    def is_published(self, snapshot: Snapshot) -> bool:
        return _is_block_hash(snapshot.hash)

    def published_hashes(self) -> list[bytes]:
        return [snapshot.hash for snapshot in self if _is_block_hash(snapshot.hash)]

    @property
    def oldest_use(self) -> float:
        """When the snapshot that `pop_oldest` would remove was last used; infinity if there is
        none."""
        return next(iter(self._evictable.values())).last_used if self._evictable else float("inf")

    def pop_oldest(self) -> Snapshot:
        """Remove the least recently used evictable snapshot. Raises: KeyError if there is none."""
        block_hash, snapshot = self._evictable.popitem(last=False)
        del self._index[block_hash]
        self._record_change(block_hash, added=False)
        return snapshot

    def remove(self, snapshot: Snapshot) -> None:
        """Remove ``snapshot``, pinned or not, because its content does not exist."""
        if self.holds(snapshot):
            del self._index[snapshot.hash]
            self._evictable.pop(snapshot.hash, None)
            self._record_change(snapshot.hash, added=False)

    def clear(self) -> None:
        """Remove all snapshots, pinned or not."""
        for snapshot in list(self):
            self.remove(snapshot)

    def touch(self, block_hash: bytes) -> None:
        """Mark the snapshot with this hash, if there is one, as the most recently used."""
        if block_hash in self._evictable:
            self._evictable.move_to_end(block_hash)
            self._evictable[block_hash].last_used = next(self._clock)

    def longest_prefix(self, hashes: Sequence[bytes], first: int, end: int) -> int:
        """Return the largest number of blocks, above ``first`` and up to ``end``, after which
        there is a snapshot; ``first`` if there is none."""
        if self._index.keys().isdisjoint(hashes[first:end]):  # usually; much faster than the loop
            return first
        return next(number for number in range(end, first, -1) if hashes[number - 1] in self)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that were added and removed since the last call, net."""
        return self._changes.take()

    def faults(self) -> Iterator[str]:
        """Yield inconsistencies of the pool, for `check_integrity`."""
        for block_hash, snapshot in self._index.items():
            if snapshot.pins < 0:
                yield f"snapshot {snapshot.id} has {snapshot.pins} pins"
            if (snapshot.pins == 0) != (self._evictable.get(block_hash) is snapshot):
                yield f"snapshot {snapshot.id} with {snapshot.pins} pins is in the wrong list"
        for block_hash in self._evictable:
            if block_hash not in self._index:
                yield f"snapshot {block_hash.hex()} is evictable but not in the pool"

    def _put(self, snapshot: Snapshot) -> None:
        self._index[snapshot.hash] = snapshot
        self._record_change(snapshot.hash, added=True)

    def _record_change(self, block_hash: bytes, *, added: bool) -> None:
        if _is_block_hash(block_hash):
            self._changes.record(block_hash, added=added)


def _is_block_hash(key: bytes) -> bool:
    return len(key) == HASH_BYTES
