"""Whether the disk accepts writes, and when to retry if it does not."""

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
"""Min and max pause between two attempts on a failing disk. It doubles each time."""

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.ESTALE)
logger = logging.getLogger(__name__)


class DiskHealth:
    """The state of the disk, with one log line per change. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._next_try = float("-inf")
        self.state: StoreState = "ok"
        self.reason = ""
        """The reason why nothing is written, if so."""
        self.errors = 0

    def may_try(self) -> bool:
        """Return whether to write now: the disk works, or the pause after a failure is over."""
        return self.state == "ok" or self._clock() >= self._next_try

    def refusal(self) -> str:
        """Return the reason why nothing is written now; "" if a write may be attempted."""
        with self._lock:
            return "" if self.may_try() else self.reason

    def failed(self, error: OSError) -> None:
        """Record a failed operation; the next attempt is due after a pause."""
        state = _state_after(error)
        with self._lock:
            self.errors += 1
            changed = state != self.state
            self._pause_s = FIRST_PAUSE_S if changed else min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._next_try = self._clock() + self._pause_s
            self.state = state
            self.reason = _REASONS.get(state, f"the disk failed: {error}")
        if changed:
            logger.warning(
                "%s (%s): blocks are not stored until this is resolved", self.reason, error
            )

    def worked(self) -> None:
        """Record that the disk accepts writes."""
        with self._lock:
            changed = self.state != "ok"
            self.state, self.reason = "ok", ""
        if changed:
            logger.warning("the disk works again, blocks are stored")


_REASONS = {
    "full": "the disk is full",
    "read_only": "the directory is not writable",
    "gone": "the directory is gone",
}


def _state_after(error: OSError) -> StoreState:
    if error.errno in DISK_FULL:
        return "full"
    if error.errno in _READ_ONLY:
        return "read_only"
    return "gone" if error.errno in _GONE else "failing"
