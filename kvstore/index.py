"""The blocks on the disk in order of their last use: sizes, ages, order.

Plain data in memory. It is not thread-safe; `DiskStore` holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvstore.directory import BlockKey, FileInfo


class LruIndex:
    """Blocks in order of their last use, oldest first.

    An index starts incomplete: its blocks exist, and blocks that it lacks may be in the
    directory too. `complete` adds the result of a scan of the directory, as older than all that
    was recorded since the start.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.is_complete = False
        self._blocks: OrderedDict[BlockKey, FileInfo] = OrderedDict()
        self._removed_while_loading: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def record_use(self, key: BlockKey, size: int, at: float) -> None:
        """Add the block, or make it the most recently used."""
        known = self._blocks.get(key)
        self.bytes += size - (known.size if known else 0)
        self._blocks[key] = FileInfo(size, at)
        self._blocks.move_to_end(key)
        self._removed_while_loading.discard(key)

    def remove(self, key: BlockKey) -> None:
        known = self._blocks.pop(key, None)
        if known:
            self.bytes -= known.size
        if not self.is_complete:
            self._removed_while_loading.add(key)

    def oldest(self) -> tuple[BlockKey, FileInfo] | None:
        return next(iter(self._blocks.items()), None)

    def complete(self, scanned: Iterable[tuple[BlockKey, FileInfo]], now: float) -> None:
        """Add what a scan found, as older than all that was used since the start."""
        newer = self._blocks
        older = [
            (key, FileInfo(info.size, min(info.last_used, now)))  # the clock may have been set back
            for key, info in scanned
            if key not in newer and key not in self._removed_while_loading
        ]
        older.sort(key=lambda item: item[1].last_used)
        self._blocks = OrderedDict(older)
        self._blocks.update(newer)
        self.bytes = sum(info.size for info in self._blocks.values())
        self.is_complete = True
        self._removed_while_loading.clear()
