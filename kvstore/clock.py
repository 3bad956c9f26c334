"""The clock by which blocks age."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

MAX_ABSENCE_S = 86400.0
"""The most that blocks age between two runs of the kvstore, however long that was."""


class SavedTime(msgspec.Struct, frozen=True):
    """The content of the file in which a clock survives its process."""

    now: float
    wall: float  # of the same moment


class StoreClock:
    """Seconds that never go back and never jump; near to wall time.

    While the kvstore runs, they pass with the monotonic clock. Between two runs they pass with
    wall time, `MAX_ABSENCE_S` at most. By wall time alone, a clock that is set right would make
    every block years old, and delete the cache.
    """

    def __init__(
        self,
        saved: bytes | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``saved`` is what `saved` returned last. Without it, or if it is damaged, the clock
        begins with wall time."""
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
