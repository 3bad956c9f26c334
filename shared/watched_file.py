"""Files that others may change or remove while a process uses them."""

from __future__ import annotations

import os
from pathlib import Path


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the contents of the file; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class OpenedFile:
    """The file that ``path`` names now, created if there is none, for its owner only.

    What is written to it is lost once the path is gone, for example because somebody deleted the
    directory, and no write says so."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._path, self._file = path, path.stat()

    @property
    def is_there(self) -> bool:
        """Whether ``path`` still names that file."""
        return names(self._path, self._file)


def names(path: Path, file: os.stat_result) -> bool:
    """Return whether ``path`` names ``file``. It does as long as nobody can tell: reads and writes
    report what is wrong with the path."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return os.path.samestat(found, file)
