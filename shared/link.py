"""A child process's line to the supervisor that started it.

The child inherits one end of a socket pair. It writes beats, one JSON object a line,
and reads nothing but the end of file: that means the supervisor is gone, whatever
killed it, and that the child has to end.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shared.rundir import RUN_DIR_VARIABLE, remove_if_abandoned

LINK_VARIABLE = "_MLX_LM_SERVER_LINK_FD"
HTTP_VARIABLE = "_MLX_LM_SERVER_HTTP_FD"
"""The router's listening socket, which outlives the router."""
ENGINE_NAME_VARIABLE = "_MLX_LM_SERVER_ENGINE"
"""An engine's name, the same after each restart."""


class SupervisorLink:
    """Safe to use from any thread."""

    def __init__(self, connection: socket.socket, run_dir: str | None = None) -> None:
        self._connection = connection
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._unsent = b""

    @classmethod
    def from_environment(cls) -> SupervisorLink | None:
        """The link this process was started with; None when it was started alone.

        The variable is taken out of the environment, so that what this process starts
        does not mistake the descriptor for its own.
        """
        number = os.environ.pop(LINK_VARIABLE, None)
        if number is None:
            return None
        connection = socket.socket(fileno=int(number))
        connection.set_inheritable(False)
        return cls(connection, os.environ.get(RUN_DIR_VARIABLE))

    def beat(self, phase: str, **facts: object) -> None:
        """Tells the supervisor that this process lives, and its ``phase``.

        Never blocks and never raises for want of a reader: a beat for which there is
        no room is dropped, and one that fitted in part is finished before the next.
        """
        line = json.dumps({"phase": phase, **facts}).encode() + b"\n"
        with self._lock:
            if self._unsent:
                self._unsent = self._unsent[self._send(self._unsent) :]
            if not self._unsent:
                sent = self._send(line)
                self._unsent = line[sent:] if sent else b""

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Calls ``on_gone`` on a thread of its own once the supervisor is gone.

        What the supervisor can no longer remove, the private directory with the
        sockets, is removed first.
        """
        threading.Thread(target=self._wait, args=(on_gone,), name="link", daemon=True).start()

    def _wait(self, on_gone: Callable[[], None]) -> None:
        try:
            while self._connection.recv(4096):
                pass
        except OSError:
            pass  # a reset is an end like any other
        if self._run_dir is not None:
            self._remove(Path(self._run_dir))
        on_gone()

    def _remove(self, run_dir: Path) -> None:
        # The system closes what a killed process had open one after the other: its end of
        # the link may be gone before its lock is.
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while not remove_if_abandoned(run_dir) and run_dir.exists():
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)

    def _send(self, data: bytes) -> int:
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT | _NO_SIGPIPE)
        except OSError:  # full, or nobody there; the latter is `watch`'s business
            return 0


_LOCK_PATIENCE_S = 2.0
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)  # not on macOS, where Python ignores SIGPIPE
