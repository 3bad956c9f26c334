"""Files that may be removed while a process has them open."""

from __future__ import annotations

from pathlib import Path


class OpenedFile:
    """The file that ``path`` names now. What is written to it is lost once the path is gone, for
    example because somebody deleted the directory, and no write says so."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path, self._identity = path, _identity(path)

    @property
    def is_there(self) -> bool:
        """Whether ``path`` still names that file."""
        try:
            return _identity(self._path) == self._identity
        except OSError:
            return False


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
