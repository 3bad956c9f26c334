"""The terminal from which a process was started.

SIGHUP has two meanings: the terminal was closed, and (by convention of servers) "reload the
configuration". The terminal itself tells them apart: once it is closed, it cannot be opened any
more.
"""

from __future__ import annotations

import os


class Terminal:
    """The controlling terminal of this process, if any."""

    def __init__(self) -> None:
        self._was_there = _can_be_opened()

    def is_closed(self) -> bool:
        """Return whether there was a terminal at the start and it is gone now."""
        return self._was_there and not _can_be_opened()


def _can_be_opened() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
