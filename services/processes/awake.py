"""Keeps a Mac awake while requests run.

macOS goes to sleep if nobody uses the machine for some minutes, whatever programs compute, and
requests then stand still until somebody wakes it. A laptop whose lid is closed sleeps all the
same."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from shared.environment import sandbox_environment

logger = logging.getLogger(__name__)

CAFFEINATE = ("/usr/bin/caffeinate", "-i", "-w")
"""macOS's command against idle sleep, until the process with the given number ends."""
RELEASE_S = 30.0
"""How long the machine stays awake after the last request. Otherwise a client that sends one
request after the other would start the command each time."""


class Awake:
    """Runs a command while there are requests, and for a while after the last one."""

    def __init__(self, command: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """``command`` gets the number of this process as its last argument, and ends with it."""
        self._command, self._clock = command, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._busy_at = 0.0
        self._is_missing = False

    @classmethod
    def here(cls) -> Awake | None:
        """Return one for this machine; None if it is no Mac."""
        return cls(CAFFEINATE) if sys.platform == "darwin" else None

    def update(self, is_busy: bool) -> None:
        """Note whether requests run now. Called about every second."""
        now = self._clock()
        if is_busy:
            self._busy_at = now
            if self._process is None or self._process.poll() is not None:
                self._start()
        elif self._process is not None and now - self._busy_at >= RELEASE_S:
            self.close()

    def close(self) -> None:
        """Let the machine sleep."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        if self._is_missing:
            return
        try:
            self._process = subprocess.Popen(
                [*self._command, str(os.getpid())],
                env=sandbox_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            self._is_missing = True
            logger.warning("this machine may go to sleep while requests run: %s", error)
