"""The system calls on the kvstore's files, in one place so that tests can inject failures."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
OF_NO_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about a file: this process lacks something."""
_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL)
"""Errors of F_FULLFSYNC on network volumes, most of which do not have it."""


class Disk:
    """Every file operation and query of the disk. All raise OSError."""

    def create(self, path: Path, data: bytes, last_used: float, durable: bool) -> None:
        """Write a new file; with ``durable``, its content survives a power loss."""
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.utime(file.fileno(), (last_used, last_used))
            if durable:
                _sync(file.fileno())

    def read(self, path: Path, limit_bytes: int) -> bytes:
        with path.open("rb", buffering=0) as file:
            return file.read(limit_bytes)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Delete a file. A missing file is not an error."""
        path.unlink(missing_ok=True)

    def set_last_used(self, path: Path, at: float) -> None:
        os.utime(path, (at, at))

    def sync_file(self, path: Path) -> None:
        """Make the content of ``path`` durable."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(fd)
        finally:
            os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Make the names in the folder ``path`` durable."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        """Return how many bytes this user may still write on the disk of ``path``."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


def _sync(fd: int) -> None:
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync leaves the data in the drive's cache
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    os.fsync(fd)
