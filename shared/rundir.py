"""The private run-time directory of one server.

It holds the ``ipc://`` sockets of its processes, has mode 0700 and a short path (macOS allows
socket paths of 103 bytes). The supervisor locks it for as long as it lives: a ZeroMQ bind silently
takes over a live socket, so no other process may use the directory of a running server.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shared.locks import try_lock

RUN_DIR_VARIABLE = "_MLX_LM_SERVER_RUN_DIR"
MAX_SOCKET_PATH_BYTES = 103

FRESH_S = 3600.0
"""How often the files are touched."""

_PREFIX = "mlxlm-"
_LOCK = "lock"
_LONGEST_NAME_BYTES = 24
_LONGEST_BASE_BYTES = MAX_SOCKET_PATH_BYTES - len(f"/{_PREFIX}12345678/") - _LONGEST_NAME_BYTES


class RunDirError(Exception):
    """There is no place for the directory."""


class RunDir:
    """A locked run-time directory, removed on leaving the context."""

    def __init__(self, path: Path, lock: int, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for wall time, which continues while the machine sleeps."""
        self.path = path
        self._lock = lock
        self._clock = clock
        self._touched_at = clock()

    @classmethod
    def create(cls, parent: Path | None = None) -> RunDir:
        """Create a directory under ``parent``, after removing the directories of dead servers of
        the same user.

        ``parent`` defaults to the first of $XDG_RUNTIME_DIR, the temporary directory and /tmp that
        is writable and has a short enough path; that of the login is the last. Raises:
        `RunDirError`, with the reason for each.
        """
        reasons = []
        for base in _bases() if parent is None else (parent,):
            if parent is None and len(os.fsencode(base)) > _LONGEST_BASE_BYTES:
                reasons.append(f"{base} is too long for a socket path")
                continue
            sweep(base)
            try:
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            except OSError as error:
                reasons.append(f"{base}: {error.strerror}")
                continue
            try:
                return cls(path, _lock_new(path))
            except OSError as error:
                shutil.rmtree(path, ignore_errors=True)
                reasons.append(f"{path}: {error.strerror}")
        raise RunDirError(f"no private directory for sockets: {'; '.join(reasons)}")

    def socket(self, name: str) -> str:
        """Return the ZeroMQ address of the socket ``name`` in this directory."""
        return f"ipc://{self.path / name}"

    def keep_fresh(self) -> None:
        """Touch everything in the directory if that is due; cheap otherwise.

        Systems delete old files in temporary directories, macOS after three days. Without its
        socket, a restarted engine would not find its router.
        """
        if abs(self._clock() - self._touched_at) < FRESH_S:
            return
        self._touched_at = self._clock()
        for path in (self.path, *self.path.rglob("*")):
            with suppress(OSError):  # removed in the meantime
                os.utime(path, follow_symlinks=False)

    def remove(self) -> None:
        """Remove the directory, then release the lock. A second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_if_abandoned(path: str | Path) -> bool:
    """Remove the directory if its supervisor is dead; return whether it was removed."""
    path = Path(path)
    try:
        lock = try_lock(path / _LOCK, create=False)
    except OSError:
        return False  # gone, or so new that it has no lock yet
    if lock is None:
        return False
    is_there = os.fstat(lock).st_nlink > 0  # not removed between opening and locking
    if is_there:
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    return is_there


def sweep(base: Path) -> int:
    """Remove the directories of this user's dead servers in ``base``; return how many."""
    removed = 0
    for path in base.glob(_PREFIX + "*"):
        try:
            status = path.lstat()
        except OSError:
            continue  # another process removed it first
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            removed += remove_if_abandoned(path)
    return removed


def _lock_new(path: Path) -> int:
    """Lock the new directory ``path``; return the descriptor that holds the lock. Raises: OSError.

    The file gets its name once it is locked: no other server ever finds it without an owner, and
    removes the directory.
    """
    unnamed = path / f"{_LOCK}.new"
    lock = try_lock(unnamed)
    assert lock is not None, "nothing else opens this file"
    unnamed.rename(path / _LOCK)
    return lock


def ends_with_login(folder: str) -> bool:
    """Return whether ``folder``, from $XDG_RUNTIME_DIR, is the one that systemd removes when the
    user logs out. A server may outlive that, and its processes would not find each other again."""
    return folder.rstrip("/") == f"/run/user/{os.getuid()}"


def _bases() -> list[Path]:
    """Return the places where a directory may be created, best first."""
    given, found = os.environ.get("XDG_RUNTIME_DIR", ""), ["/tmp"]
    with suppress(FileNotFoundError):  # none is writable
        found.insert(0, tempfile.gettempdir())
    found.insert(len(found) if ends_with_login(given) else 0, given)
    return [Path(each) for each in dict.fromkeys(found) if each]
