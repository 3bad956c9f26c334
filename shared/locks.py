"""File locks, which the system releases when their process ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


def try_lock(path: Path, *, create: bool = True) -> int | None:
    """Lock the file ``path`` and return a descriptor, which holds the lock until it is closed.

    None if another process holds the lock. On a read-only disk the file must exist. Raises: OSError
    if the file cannot be locked.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return lock
