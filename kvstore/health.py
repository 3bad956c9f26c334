"""Whether the disk takes blocks, and when to try again if it does not."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

from kvstore.disk import DISK_FULL
from shared.wire import StoreState

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Bounds of the pause between two tries on a disk that fails. It doubles from one to the next."""

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ESTALE)
logger = logging.getLogger(__name__)


class DiskHealth:
    """The state of the disk, with one log line for each change. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._next_try = float("-inf")
        self.state: StoreState = "ok"
        self.reason = ""
        """Why nothing is written, if nothing is."""
        self.errors = 0

    def may_try(self) -> bool:
        """Return whether to write now: the disk works, or the pause after a failure is over."""
        return self.state == "ok" or self._clock() >= self._next_try

    def refusal(self) -> str:
        """Return why nothing is written now; "" if something may be tried."""
        with self._lock:
            return "" if self.may_try() else self.reason

    def failed(self, error: OSError) -> None:
        """Note that an operation failed; the next try is due after a pause."""
        state = _state_after(error)
        with self._lock:
            self.errors += 1
            changed = state != self.state
            self._pause_s = FIRST_PAUSE_S if changed else min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._next_try = self._clock() + self._pause_s
            self.state = state
            self.reason = _REASONS.get(state, f"the disk fails: {error}")
        if changed:
            logger.warning("%s (%s): blocks are not stored until that is over", self.reason, error)

    def worked(self) -> None:
        """Note that the disk takes blocks."""
        with self._lock:
            changed = self.state != "ok"
            self.state, self.reason = "ok", ""
        if changed:
            logger.warning("the disk works again: blocks are stored")


_REASONS = {
    "full": "the disk is full",
    "read_only": "the directory cannot be written",
    "gone": "the directory is gone",
}


def _state_after(error: OSError) -> StoreState:
    if error.errno in DISK_FULL:
        return "full"
    if error.errno in _READ_ONLY:
        return "read_only"
    return "gone" if error.errno in _GONE else "failing"
