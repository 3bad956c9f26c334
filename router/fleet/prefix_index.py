"""The blocks of prefixes that an engine has in RAM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from shared.wire import CacheEvents

_ASSUMED_LIMIT = 65_536


class PrefixIndex:
    """The blocks that an engine has reported, and those that it is about to have.

    The latter are assumed when a sequence is placed there. Their number is bounded (LRU).
    """

    def __init__(self, assumed_limit: int = _ASSUMED_LIMIT) -> None:
        self._reported: set[bytes] = set()
        self._assumed: OrderedDict[bytes, None] = OrderedDict()
        self._assumed_limit = assumed_limit
        self._number: int | None = None

    def update(self, events: CacheEvents) -> None:
        if events.snapshot or self._number is None or events.number != self._number + 1:
            self._reported = set(events.added)
            self._assumed.clear()
        else:
            self._reported.update(events.added)
        self._number = events.number
        self._reported.difference_update(events.removed)
        for block in events.removed:
            self._assumed.pop(block, None)

    def assume(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self._assumed[block] = None
            self._assumed.move_to_end(block)
        while len(self._assumed) > self._assumed_limit:
            self._assumed.popitem(last=False)

    def num_cached_blocks(self, blocks: Sequence[bytes]) -> int:
        """Return how many of ``blocks`` the engine need not compute: those up to the last known.

        The engine has the blocks before that one too, or, if it stands for recurrent state, does
        not report them.
        """
        if self._reported.isdisjoint(blocks) and self._assumed.keys().isdisjoint(blocks):
            return 0
        for count in range(len(blocks), 0, -1):
            if blocks[count - 1] in self._reported or blocks[count - 1] in self._assumed:
                return count
        return 0
