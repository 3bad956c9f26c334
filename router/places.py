"""A limited number of places for expensive work, shared fairly between keys."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque


class Places:
    """The next place goes to the waiting key with the fewest places; within a key, to the
    request that has waited longest."""

    def __init__(self, count: int) -> None:
        self._free = count
        self.taken: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)

    async def take(self, key: str) -> None:
        """Wait for a slot. Return it with `give_back`."""
        place = asyncio.get_running_loop().create_future()
        self._waiting[key].append(place)
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back(key)
            else:
                place.cancel()
            raise

    def give_back(self, key: str) -> None:
        self.taken[key] -= 1
        if not self.taken[key]:
            del self.taken[key]
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and self._waiting:
            key = min(self._waiting, key=lambda key: self.taken[key])
            place = self._waiting[key].popleft()
            if not self._waiting[key]:
                del self._waiting[key]
            if not place.done():
                self._free -= 1
                self.taken[key] += 1
                place.set_result(None)
