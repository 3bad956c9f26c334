"""The link between a child process and the supervisor that started it.

The child inherits one end of a socket pair. Both sides write JSON objects, one per line: the child
sends heartbeats (with a ``phase``) and messages, the supervisor sends messages. End of file tells
the child that the supervisor is gone, for whatever reason, and that it must exit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from shared.rundir import RUN_DIR_VARIABLE, remove_if_abandoned

LINK_VARIABLE = "_MLX_LM_SERVER_LINK_FD"
HTTP_VARIABLE = "_MLX_LM_SERVER_HTTP_FD"
"""The router's listening socket, which outlives the router."""
ENGINE_NAME_VARIABLE = "_MLX_LM_SERVER_ENGINE"
"""An engine's name, the same after each restart."""

SERVER_ENDS = signal.SIGUSR1
"""Tells a router that the whole server is stopping. A SIGTERM instead asks for a new router, which
the supervisor then starts. (Before a process installs its handlers, either signal ends it
silently.)
"""


class LineReader:
    """Decodes messages from the bytes that arrive over a link."""

    MAX_LINE_BYTES: ClassVar = 256 * 1024

    def __init__(self) -> None:
        self._incomplete = b""

    def lines(self, data: bytes) -> Iterator[Mapping[str, Any]]:
        """Yield the messages that ``data`` completes. Invalid lines are skipped."""
        *complete, rest = (self._incomplete + data).split(b"\n")
        self._incomplete = rest[-self.MAX_LINE_BYTES :]
        for line in complete:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                yield message


class LineWriter:
    """Writes messages to a link, each completely or not at all. Never blocks. Safe to use from any
    thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        with suppress(OSError):  # macOS has room for 8 KiB by default
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LineReader.MAX_LINE_BYTES)
        self._connection = connection
        self._lock = threading.Lock()
        self._unsent = b""

    def write(self, message: Mapping[str, Any]) -> bool:
        """Send ``message``; return False if there is no room for it, or no reader.

        A partly written message counts as sent: its rest goes with `flush`, or before the next
        message.
        """
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._send_rest()
            if self._unsent:
                return False
            sent = self._send(line)
            self._unsent = line[sent:] if sent else b""
            return sent > 0

    def flush(self) -> None:
        """Send as much of a partly written message as there is room for."""
        with self._lock:
            self._send_rest()

    def _send_rest(self) -> None:
        if self._unsent:
            self._unsent = self._unsent[self._send(self._unsent) :]

    def _send(self, data: bytes) -> int:
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT | _NO_SIGPIPE)
        except OSError:  # full, or the other end is gone, which the reader handles
            return 0


class SupervisorLink:
    """The child's end of the link. Safe to use from any thread."""

    def __init__(self, connection: socket.socket, run_dir: str | None = None) -> None:
        self._connection = connection
        self._run_dir = run_dir
        self._writer = LineWriter(connection)

    @classmethod
    def from_environment(cls) -> SupervisorLink | None:
        """Return the link that this process inherited; None if no supervisor started it.

        The variable is removed from the environment, so that child processes do not use the
        descriptor.
        """
        number = os.environ.pop(LINK_VARIABLE, None)
        if number is None:
            return None
        connection = socket.socket(fileno=int(number))
        connection.set_inheritable(False)
        return cls(connection, os.environ.get(RUN_DIR_VARIABLE))

    def heartbeat(self, phase: str, **facts: object) -> None:
        """Tell the supervisor that this process is alive, and its ``phase``.

        Never blocks, and never raises if there is no reader. A heartbeat that does not fit is
        dropped.
        """
        self._writer.write({"phase": phase, **facts})

    def send(self, **message: object) -> bool:
        """Send a message other than a heartbeat; return whether it was sent."""
        return self._writer.write(message)

    def watch(
        self,
        on_gone: Callable[[], None],
        on_message: Callable[[Mapping[str, Any]], None] = lambda message: None,
    ) -> None:
        """Call ``on_message`` with each message of the supervisor, on a separate thread, and
        ``on_gone`` once the supervisor is gone.

        Before ``on_gone``, remove the private directory with the sockets, which the supervisor can
        no longer remove.
        """
        threading.Thread(
            target=self._wait, args=(on_gone, on_message), name="link", daemon=True
        ).start()

    def _wait(
        self, on_gone: Callable[[], None], on_message: Callable[[Mapping[str, Any]], None]
    ) -> None:
        reader = LineReader()
        try:
            while data := self._connection.recv(reader.MAX_LINE_BYTES):
                for message in reader.lines(data):
                    on_message(message)
        except OSError:
            pass  # a reset is also an end
        if self._run_dir is not None:
            self._remove(Path(self._run_dir))
        on_gone()

    def _remove(self, run_dir: Path) -> None:
        # The system closes the descriptors of a killed process one after the other: its end of the
        # link may close before its lock is released.
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while not remove_if_abandoned(run_dir) and run_dir.exists():
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)


_LOCK_PATIENCE_S = 2.0
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)  # not on macOS, where Python ignores SIGPIPE
