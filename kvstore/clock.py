"""The clock that measures the age of blocks."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

MAX_ABSENCE_S = 86400.0
"""Max aging of blocks between two runs of the kvstore, however long it was stopped."""


class SavedTime(msgspec.Struct, frozen=True):
    """The content of the file that keeps a clock across restarts."""

    now: float
    wall: float  # at the same moment


class StoreClock:
    """Seconds that never go back or jump, close to wall time.

    While the kvstore runs, they follow the monotonic clock. Between two runs they follow wall time,
    up to `MAX_ABSENCE_S`. With wall time alone, correcting a wrong clock could make every block
    years old and delete the cache.
    """

    def __init__(
        self,
        saved: bytes | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``saved`` is the last result of `saved`. If it is missing or damaged, the clock starts at
        wall time."""
        self._wall = wall
        self._monotonic = monotonic
        self._offset_s = _resume(saved, wall()) - monotonic()

    def __call__(self) -> float:
        return self._offset_s + self._monotonic()

    def saved(self) -> bytes:
        return msgspec.json.encode(SavedTime(now=self(), wall=self._wall()))


def _resume(saved: bytes | None, wall: float) -> float:
    if saved is None:
        return wall
    try:
        last = msgspec.json.decode(saved, type=SavedTime)
    except msgspec.MsgspecError:
        return wall
    return last.now + min(max(wall - last.wall, 0.0), MAX_ABSENCE_S)
