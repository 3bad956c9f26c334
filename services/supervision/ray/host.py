"""The actor next to an engine: it starts the process, and forwards its messages.

The engine is connected by a pipe (`shared.supervisor_link`) and treats its end as the end of its
supervisor: it therefore exits with its actor, for whatever reason.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from engine.backend import allocation
from shared.environment import environment_without
from shared.exits import EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from shared.paths import python_path
from shared.settings import SECRET_VARIABLES
from shared.supervisor_link import ENGINE_NAME_VARIABLE, LINK_VARIABLE

FOR_GOOD = (EXIT_OK, EXIT_CONFIG, EXIT_USAGE)
"""Exit codes after which a restart would not help."""
Said = list[tuple[Literal["beat", "log", "exit"], Any]]
_READ_S = 1.0
_MAX_BYTES = 256 * 1024


class EngineHost:
    """Runs one engine. Its methods are called through Ray, `read` by one caller at a time."""

    def __init__(self, name: str, arguments: Sequence[str], keys: Mapping[str, str]) -> None:
        """``arguments`` are an engine's; ``keys`` are the files of --curve-dir."""
        # A file managed by Ray would be world-readable; this directory is removed with the actor.
        self._directory = tempfile.TemporaryDirectory(prefix="mlxlm-ray-")
        for file, text in keys.items():
            (Path(self._directory.name) / file).write_text(text)
            (Path(self._directory.name) / file).chmod(0o600)
        self._link, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "services.processes.engine", *arguments),
                    f"--curve-dir={self._directory.name}",
                ],
                env={
                    **environment_without(SECRET_VARIABLES),
                    **allocation.environment(os.environ),
                    ENGINE_NAME_VARIABLE: name,
                    LINK_VARIABLE: str(child_end.fileno()),
                    "PYTHONPATH": python_path(),
                    "PYTHONUNBUFFERED": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_end.fileno(),),
                process_group=0,
            )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._link, selectors.EVENT_READ, "beat")
        self._selector.register(self._process.stdout, selectors.EVENT_READ, "log")
        self._was_ready = False
        self._told_to_end = False

    def read(self) -> Said:
        """Wait a while for messages of the engine, and return them; the last one is its exit code.

        An engine that fails after it was ready ends this process too, which Ray then restarts, here
        or on another machine.
        """
        said: Said = []
        for key, _ in self._selector.select(_READ_S):
            data = os.read(key.fd, _MAX_BYTES)
            if data:
                said.append((key.data, data))
            else:
                self._selector.unregister(key.fileobj)
            self._was_ready = self._was_ready or b'"ready"' in data
        if not self._selector.get_map():
            code = self._process.wait()
            self._directory.cleanup()  # it has keys, and nobody else removes it
            if self._was_ready and not self._told_to_end and code not in FOR_GOOD:
                os._exit(1)
            said.append(("exit", code))
        return said

    def write(self, data: bytes) -> None:
        """Send ``data`` to the engine, in the role of its supervisor."""
        self._link.sendall(data)

    def signal(self, number: int, ends: bool) -> None:
        """Send a signal to the engine."""
        self._told_to_end = self._told_to_end or ends
        if self._process.poll() is None:
            self._process.send_signal(number)
            self._process.send_signal(signal.SIGCONT)  # a stopped process handles no other signal
