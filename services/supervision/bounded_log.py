"""Bounds the log file that launchd gives a service as its output."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

LAUNCHD_LOG_VARIABLE = "_MLX_LM_SERVER_LAUNCHD_LOG"
"""The file of a service's output. Only services of launchd have it, which bounds no log and starts
them again after any exit code but 0."""
MAX_BYTES = 64 << 20
_CHECK_EVERY_S = 60.0


class BoundedLog:
    """Keeps the last file of ``MAX_BYTES`` beside the current one, to which the processes of the
    server append."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get(LAUNCHD_LOG_VARIABLE)
        self._path = None if path is None else Path(path)
        self._check_at = 0.0

    def tick(self, now: float) -> None:
        if self._path is None or now < self._check_at:
            return
        self._check_at = now + _CHECK_EVERY_S
        output = sys.stdout.fileno()
        found = os.fstat(output)
        appends = fcntl.fcntl(output, fcntl.F_GETFL) & os.O_APPEND
        if stat.S_ISREG(found.st_mode) and appends and found.st_size > MAX_BYTES:
            shutil.copyfile(self._path, self._path.with_suffix(".log.1"))
            os.ftruncate(output, 0)
