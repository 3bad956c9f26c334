"""The blocks on the disk in order of their last use: sizes, ages, order.

Plain data in memory. It is not thread-safe; `DiskStore` holds a lock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from struct import Struct

from kvstore.directory import BlockKey, FileInfo
from shared.blockfile import MAX_FILE_BYTES
from shared.hashing import HASH_BYTES

_SIZE_BITS = (2 * MAX_FILE_BYTES - 1).bit_length()
"""With this many, an integer of size and time needs no third digit before the year 2038."""

_ENTRY = Struct(">QI")
"""Last use (in microseconds) and size of a block, in front of its key: sorts by last use."""
_SORTED_RUN = 16384
"""Blocks that are sorted at once: a million would stop all threads for a second."""


class LruIndex:
    """Blocks in order of their last use, oldest first.

    An index starts incomplete: its blocks exist, and blocks that it lacks may be in the
    directory too. `complete` adds the result of a scan of the directory, as older than all that
    was recorded since the start.

    A million blocks are usual, so that each is one key of bytes and one integer. (A tuple for
    each of them took twice the memory.)
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.is_complete = False
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        self._removed_while_loading: set[bytes] = set()

    @classmethod
    def of(cls, found: Iterable[tuple[BlockKey, FileInfo]], now: float) -> LruIndex:
        """Return an index of ``found``, given in any order; none was used after ``now``."""
        scanned, runs = iter(found), []
        while run := [
            _ENTRY.pack(max(0, int(1e6 * min(info.last_used, now))), info.size) + _pack_key(key)
            for key, info in itertools.islice(scanned, _SORTED_RUN)
        ]:
            run.sort(reverse=True)
            runs.append(run)
        index = cls()
        for entry in heapq.merge(*map(_drain, runs)):
            at_us, size = _ENTRY.unpack_from(entry)
            index.record_use(_unpack_key(entry[_ENTRY.size :]), size, at_us / 1e6)
        return index

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return _pack_key(key) in self._blocks

    def record_use(self, key: BlockKey, size: int, at: float) -> None:
        """Add the block, or make it the most recently used."""
        packed = _pack_key(key)
        known = self._blocks.pop(packed, None)
        self.bytes += size - (0 if known is None else _unpack_info(known).size)
        self._blocks[packed] = _pack_info(size, at)
        self._removed_while_loading.discard(packed)

    def remove(self, key: BlockKey) -> None:
        packed = _pack_key(key)
        known = self._blocks.pop(packed, None)
        if known is not None:
            self.bytes -= _unpack_info(known).size
        if not self.is_complete:
            self._removed_while_loading.add(packed)

    def keys_of(self, namespace: str) -> list[BlockKey]:
        root = bytes.fromhex(namespace)
        return [_unpack_key(packed) for packed in self._blocks if packed.startswith(root)]

    def oldest(self) -> tuple[BlockKey, FileInfo] | None:
        for packed, info in self._blocks.items():
            return _unpack_key(packed), _unpack_info(info)
        return None

    def complete(self, scanned: LruIndex) -> None:
        """Take over what a scan found, as older than all that was used since the start.

        ``scanned`` is used up. This takes time for what was used since the start only, since a
        lock is held meanwhile.
        """
        blocks, self.bytes = scanned._blocks, scanned.bytes
        newer, self._blocks = self._blocks, blocks
        for packed in (*self._removed_while_loading, *newer):
            known = blocks.pop(packed, None)
            self.bytes -= 0 if known is None else _unpack_info(known).size
        for packed, info in newer.items():
            blocks[packed] = info
            self.bytes += _unpack_info(info).size
        self.is_complete = True
        self._removed_while_loading.clear()


def _pack_key(key: BlockKey) -> bytes:
    return bytes.fromhex(key.namespace) + key.hash


def _unpack_key(packed: bytes) -> BlockKey:
    return BlockKey(packed[:-HASH_BYTES].hex(), packed[-HASH_BYTES:])


def _pack_info(size: int, at: float) -> int:
    return max(0, math.ceil(at)) << _SIZE_BITS | size


def _unpack_info(packed: int) -> FileInfo:
    return FileInfo(packed & ((1 << _SIZE_BITS) - 1), packed >> _SIZE_BITS)


def _drain(run: list[bytes]) -> Iterator[bytes]:
    """Yield the entries of ``run`` from its end, and free each."""
    while run:
        yield run.pop()
