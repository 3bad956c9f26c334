"""The pool of cached blocks, and the order in which they are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from engine.plan import BlockName


@dataclass(eq=False, slots=True)
class Block:
    """A cached block or snapshot."""

    id: int
    hash: bytes
    pins: int = 1  # operations in flight that use it
    stored: bool = False  # whether the kvstore has it
    last_used: int = 0  # time of its last use, by the pools' clock
    is_snapshot: bool = False
    """It holds no KV, but the recurrent state at the end of the prefix with this hash."""

    @property
    def name(self) -> BlockName:
        return BlockName(self.id, self.hash, self.is_snapshot)


class BlockPool:
    """Blocks by hash. A block without references in flight is evictable, least recently used first.
    Ids are never reused. Every operation is O(1) per block.

    Pools with the same ``clock`` share no id, and the last uses of their blocks can be compared.
    """

    _of_snapshots = False

    def __init__(self, clock: count[int] | None = None) -> None:
        self._index: dict[bytes, Block] = {}
        self._evictable: OrderedDict[bytes, Block] = OrderedDict()
        self._changes: dict[bytes, bool] = {}
        self._clock = count() if clock is None else clock

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._index.values())

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._index

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def get(self, block_hash: bytes) -> Block | None:
        return self._index.get(block_hash)

    def add(self, block_hash: bytes, *, stored: bool = False) -> Block:
        """Add a block, pinned once. Raises: ValueError if its hash is in the pool."""
        if block_hash in self._index:
            raise ValueError("this block is already in the pool")
        block = Block(next(self._clock), block_hash, stored=stored, is_snapshot=self._of_snapshots)
        self._put(block)
        return block

    def pin(self, block: Block) -> None:
        block.pins += 1
        self._evictable.pop(block.hash, None)

    def unpin(self, block: Block) -> None:
        """Undo one `pin`. The last one makes ``block`` evictable, as the most recently used."""
        block.pins -= 1
        if not block.pins and self._index.get(block.hash) is block:
            self._evictable[block.hash] = block
            block.last_used = next(self._clock)

    @property
    def oldest_use(self) -> float:
        """When the block that `pop_oldest` would remove was last used; infinity if
        there is none."""
        return next(iter(self._evictable.values())).last_used if self._evictable else float("inf")

    def pop_oldest(self) -> Block:
        """Remove the least recently used evictable block. Raises: KeyError if there is none."""
        block_hash, block = self._evictable.popitem(last=False)
        del self._index[block_hash]
        self._record_change(block_hash, added=False)
        return block

    def remove(self, block: Block) -> None:
        """Remove ``block``, pinned or not, because its content does not exist."""
        if self._index.get(block.hash) is block:
            del self._index[block.hash]
            self._evictable.pop(block.hash, None)
            self._record_change(block.hash, added=False)

    def clear(self) -> None:
        """Remove all blocks, pinned or not."""
        for block in list(self):
            self.remove(block)

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many of ``hashes``, from the first without a gap, are in the pool."""
        for number, block_hash in enumerate(hashes):
            if block_hash not in self._index:
                return number
        return len(hashes)

    def touch(self, hashes: Sequence[bytes]) -> int:
        """Mark ``hashes`` as most recently used, the first of them last of all, because a chain is
        useless without its head. Returns the same as `match_prefix`."""
        leading = len(hashes)
        for number in range(len(hashes) - 1, -1, -1):
            if hashes[number] in self._evictable:
                self._evictable.move_to_end(hashes[number])
                self._evictable[hashes[number]].last_used = next(self._clock)
            elif hashes[number] not in self._index:
                leading = number
        return leading

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that were added and removed since the last call, net."""
        added = [block_hash for block_hash, exists in self._changes.items() if exists]
        removed = [block_hash for block_hash, exists in self._changes.items() if not exists]
        self._changes.clear()
        return added, removed

    def faults(self) -> Iterator[str]:
        """Yield inconsistencies of the pool, for `check_integrity`."""
        for block_hash, block in self._index.items():
            if block.pins < 0:
                yield f"block {block.id} has {block.pins} pins"
            if (block.pins == 0) != (self._evictable.get(block_hash) is block):
                yield f"block {block.id} with {block.pins} pins is in the wrong list"
        for block_hash in self._evictable:
            if block_hash not in self._index:
                yield f"block {block_hash.hex()} is evictable but not in the pool"

    def _put(self, block: Block) -> None:
        self._index[block.hash] = block
        self._record_change(block.hash, added=True)

    def _record_change(self, block_hash: bytes, *, added: bool) -> None:
        if self._changes.get(block_hash, added) != added:
            del self._changes[block_hash]
        else:
            self._changes[block_hash] = added
