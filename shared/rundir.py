"""The private directory in which the processes of one server meet.

It holds the ``ipc://`` sockets, has mode 0700 and a short path (macOS allows a socket
path of 103 bytes), and is locked by the supervisor for as long as that lives: a
ZeroMQ bind silently takes over a live socket, so nobody may ever use the directory of
a living server.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

RUN_DIR_VARIABLE = "_MLX_LM_SERVER_RUN_DIR"
MAX_SOCKET_PATH_BYTES = 103

_PREFIX = "mlxlm-"
_LOCK = "lock"
_LONGEST_NAME_BYTES = 24


class RunDirError(Exception):
    """The directory cannot be used: no place for it, or a living server has it."""


class RunDir:
    """A locked run-time directory; leaving the context removes it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, parent: Path | None = None) -> RunDir:
        """A new directory under ``parent`` (default: the first of $XDG_RUNTIME_DIR, the
        temporary directory and /tmp whose path is short enough), after those that dead
        servers of the same user left there have been removed."""
        base = parent or _base()
        sweep(base)
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            raise RunDirError(f"no private directory in {base}: {error.strerror}") from error
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Takes over the existing directory ``path``; refused while another has it."""
        lock = _try_lock(path, create=True)
        if lock is None:
            raise RunDirError(f"{path} belongs to a server that is running")
        return cls(path, lock)

    def socket(self, name: str) -> str:
        """The ZeroMQ address of the socket ``name`` in this directory."""
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """Removes the directory, then gives up the lock. Does nothing the second time."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def remove_if_abandoned(path: str | Path) -> bool:
    """Removes the directory of a supervisor that is dead; says whether it did."""
    path = Path(path)
    lock = _try_lock(path, create=False)
    if lock is None:
        return False
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    return True


def sweep(base: Path) -> int:
    """Removes what dead servers of this user left in ``base``; returns how many."""
    removed = 0
    for path in base.glob(_PREFIX + "*"):
        try:
            status = path.lstat()
        except OSError:
            continue  # another one was quicker
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            removed += remove_if_abandoned(path)
    return removed


def _try_lock(path: Path, *, create: bool) -> int | None:
    """The descriptor that holds the lock of ``path``; None when another process has it
    or the directory is gone. Without ``create`` a directory that has no lock file yet
    is left alone: its owner is just making it."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        lock = os.open(path / _LOCK, flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:  # else it was removed between the two calls
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _base() -> Path:
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if not candidate or not os.access(candidate, os.W_OK | os.X_OK):
            continue
        longest = len(os.fsencode(candidate)) + 1 + len(_PREFIX) + 8 + 1 + _LONGEST_NAME_BYTES
        if longest <= MAX_SOCKET_PATH_BYTES:
            return Path(candidate)
    raise RunDirError("no writable temporary directory with a path short enough for sockets")
