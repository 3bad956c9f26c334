"""Which blocks there are and which of them was used last: sizes, ages, order.

Plain data in memory; whoever shares one between threads holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvstore.directory import BlockKey, FileInfo


class LruIndex:
    """Blocks in order of their last use, oldest first.

    Starts incomplete: what was added is right, what is missing may still be in the
    directory. `complete` merges the scan of the directory under what happened meanwhile.
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
        """Adds the block, or makes it the one used last."""
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
        """Takes over what a scan found, as older than all that was used since the start."""
        newer = self._blocks
        older = [
            (key, FileInfo(info.size, min(info.last_used, now)))  # a clock was set back
            for key, info in scanned
            if key not in newer and key not in self._removed_while_loading
        ]
        older.sort(key=lambda item: item[1].last_used)
        self._blocks = OrderedDict(older)
        self._blocks.update(newer)
        self.bytes = sum(info.size for info in self._blocks.values())
        self.is_complete = True
        self._removed_while_loading.clear()
