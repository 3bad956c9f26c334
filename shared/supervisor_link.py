"""The link between a child process and the supervisor that started it.

The child inherits one end of a socket pair. It writes beats, one JSON object a line, and reads
nothing but the end of file. That means that the supervisor is gone, whatever killed it, and
that the child has to end.
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
    """The child's end of the link. Safe to use from any thread."""

    def __init__(self, connection: socket.socket, run_dir: str | None = None) -> None:
        self._connection = connection
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._unsent = b""

    @classmethod
    def from_environment(cls) -> SupervisorLink | None:
        """Return the link that this process inherited; None if it was started alone.

        The variable is removed from the environment, so that child processes do not take the
        descriptor for their own.
        """
        number = os.environ.pop(LINK_VARIABLE, None)
        if number is None:
            return None
        connection = socket.socket(fileno=int(number))
        connection.set_inheritable(False)
        return cls(connection, os.environ.get(RUN_DIR_VARIABLE))

    def beat(self, phase: str, **facts: object) -> None:
        """Tell the supervisor that this process is alive, and its ``phase``.

        It never blocks, and never raises for lack of a reader. A beat that does not fit is
        dropped; a beat that fitted in part is completed before the next.
        """
        line = json.dumps({"phase": phase, **facts}).encode() + b"\n"
        with self._lock:
            if self._unsent:
                self._unsent = self._unsent[self._send(self._unsent) :]
            if not self._unsent:
                sent = self._send(line)
                self._unsent = line[sent:] if sent else b""

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` on a separate thread once the supervisor is gone.

        Before that, remove the private directory with the sockets, which the supervisor can no
        longer remove.
        """
        threading.Thread(target=self._wait, args=(on_gone,), name="link", daemon=True).start()

    def _wait(self, on_gone: Callable[[], None]) -> None:
        try:
            while self._connection.recv(4096):
                pass
        except OSError:
            pass  # a reset is an end too
        if self._run_dir is not None:
            self._remove(Path(self._run_dir))
        on_gone()

    def _remove(self, run_dir: Path) -> None:
        # The system closes the descriptors of a killed process one after the other: its end of
        # the link may be closed before its lock is released.
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while not remove_if_abandoned(run_dir) and run_dir.exists():
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)

    def _send(self, data: bytes) -> int:
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT | _NO_SIGPIPE)
        except OSError:  # full, or the supervisor is gone, which `watch` handles
            return 0


_LOCK_PATIENCE_S = 2.0
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)  # not on macOS, where Python ignores SIGPIPE
