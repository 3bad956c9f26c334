"""A limit on the memory of this process while it does what a client asks for."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.exits import EXIT_FAILED

LOOK_EVERY_S = 0.2


class MemoryLimit:
    """At most ``more_bytes`` more than the process uses now.

    Linux refuses allocations beyond it. macOS has no such limit: a thread watches the memory in
    use, and ends the process."""

    def __init__(self, more_bytes: int) -> None:
        self._max_mapped_bytes = self._max_used_bytes = 0
        if sys.platform == "linux":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            self._max_mapped_bytes = pages * resource.getpagesize() + more_bytes
        else:
            self._max_used_bytes = used_bytes() + more_bytes

    @contextmanager
    def applied(self) -> Iterator[None]:
        if not self._max_mapped_bytes:
            with exit_beyond(self._max_used_bytes):
                yield
            return
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (self._max_mapped_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def used_bytes() -> int:
    """Return the resident memory of the process, 0 if it cannot be read now."""
    command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    try:
        shown = subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        return 0
    return int(shown.strip() or 0) * 1024


@contextmanager
def exit_beyond(max_bytes: int) -> Iterator[None]:
    """End the process when it uses more than ``max_bytes`` meanwhile."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(max_bytes, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(max_bytes: int, over: threading.Event) -> None:
    while not over.wait(LOOK_EVERY_S):
        if used_bytes() > max_bytes:
            os._exit(EXIT_FAILED)
