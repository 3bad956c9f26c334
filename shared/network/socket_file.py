"""The file of an ``ipc://`` address."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from shared.locks import try_lock

_NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ENOENT)


class SocketFileError(Exception):
    """The address cannot be bound, for the reason in the message."""


class SocketFile:
    """Reserve ``address`` for this process, because a ZeroMQ bind would silently take it over from
    another one, or replace a file. Does nothing for an address that is not ``ipc://``.

    Raises: `SocketFileError`.
    """

    def __init__(self, address: str) -> None:
        self._lock: int | None = None
        scheme, _, path = address.partition("://")
        if scheme != "ipc":
            return
        self._path = Path(path)
        try:
            if self._is_other_file():
                raise SocketFileError(f"cannot bind {address}: it exists, and is not a socket")
            self._lock = try_lock(Path(f"{path}.lock"))
        except OSError as error:
            raise SocketFileError(f"cannot bind {address}: {error.strerror}") from None
        if self._lock is None or self._has_listener():
            self._unlock()
            raise SocketFileError(f"cannot bind {address}: another process uses it")

    def remove(self) -> None:
        """Remove the file, which ZeroMQ does not, and give the address up."""
        if self._lock is not None:
            with suppress(OSError):
                if not self._is_other_file():
                    self._path.unlink()
            self._unlock()

    def _is_other_file(self) -> bool:
        """Return whether something else than a socket has the name: a bind would delete it."""
        try:
            return not stat.S_ISSOCK(self._path.lstat().st_mode)
        except FileNotFoundError:
            return False

    def _has_listener(self) -> bool:
        """Return whether a process without the lock listens, such as another program."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            return probe.connect_ex(str(self._path)) not in _NOBODY_LISTENS

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
