"""Small files with what a start has found out, so that the next one need not."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_FILES = 256
"""The oldest of a folder are deleted above this number. One of 30 layers has 4 KB."""


def keep(path: Path, body: bytes, what: str) -> None:
    """Write ``body`` to ``path`` as a whole. If the folder is not writable, the log says that
    ``what`` cannot be stored, and only the next start takes longer."""
    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(body)
        scratch.replace(path)
        files = sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            remove(old)
    except OSError as error:
        logger.warning("cannot store %s: %s", what, error)
        remove(scratch)


def remove(path: Path) -> None:
    """Delete ``path`` if it exists and that is possible."""
    with contextlib.suppress(OSError):
        path.unlink()
