"""The prefix blocks that an engine has in RAM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from shared.wire import CacheEvents

_ASSUMED_LIMIT = 65_536


class PrefixIndex:
    """The blocks that an engine has reported, and those it is expected to have soon.

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

    def num_cached_blocks(self, blocks: Sequence[bytes], at_least: int = 1) -> int:
        """Return how many of ``blocks`` the engine need not compute: those up to the last known
        one. 0 if fewer than ``at_least``, which is detected sooner.

        The engine also has the blocks before that one or, if it stands for recurrent state, does
        not report them.
        """
        end = blocks[at_least - 1 :]
        # Comparing sets takes a tenth of the time of a loop: there are many engines and many
        # blocks.
        known = self._reported.intersection(end) | (self._assumed.keys() & end)
        for count in range(len(blocks), at_least - 1, -1) if known else ():
            if blocks[count - 1] in known:
                return count
        return 0
