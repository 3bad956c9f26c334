"""A capacity of which no share can take all. A share is an API key's, or an address's without keys.

A share may take one more while it has fewer than are free: alone it gets half of them, beside k
equally busy ones a (k + 2)th, and some are always free for a new one. (Dynamic thresholds:
Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998. The
alternative was fixed parts: two halves leave nothing for a third share.)
"""

from __future__ import annotations

from collections import Counter


class FairShares:
    """What each share has of a capacity: requests, places or bytes."""

    def __init__(self) -> None:
        self.total = 0
        self._taken: Counter[str] = Counter()
        """By share, for those that have any."""

    def of(self, share: str) -> int:
        return self._taken[share]

    def has_room(self, share: str, limit: int, more: int = 1, *, alone: bool = False) -> bool:
        """Return whether ``share`` may take ``more`` of ``limit``, one after the other. If it is
        the only one (``alone``), it may have all."""
        free = limit - self.total
        return more <= free if alone else self._taken[share] + 2 * more - 1 <= free

    def take(self, share: str, more: int = 1) -> None:
        self.total += more
        self._taken[share] += more

    def give_back(self, share: str, fewer: int = 1) -> None:
        self.total -= fewer
        self._taken[share] -= fewer
        if not self._taken[share]:
            del self._taken[share]
