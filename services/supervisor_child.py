"""One child process of the supervisor: start it, read its beats, end it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.supervisor_output import LogCollector
from shared.supervisor_link import LINK_VARIABLE

_MAX_BEAT_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """How to run a child."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    # Variables of our own environment that the child does not get.
    hidden_variables: frozenset[str] = frozenset()
    # Environment variable -> inherited descriptor, whose number is its value.
    descriptors: Mapping[str, int] = field(default_factory=dict)
    stop_stage: int = 0  # children of a lower stage end before those of the next are told to
    announces_ready: bool = False  # the server is ready when all of these children are
    takes_hang_up: bool = False  # SIGHUP is passed on to it, once it has sent a beat


class Child:
    """A running process made from ``spec``. Times are of ``time.monotonic``."""

    def __init__(self, spec: ChildSpec, output: LogCollector, now: float) -> None:
        self.spec = spec
        self.started_at = now
        self.last_beat_at: float | None = None
        self.phase = ""
        self.link, child_end = socket.socketpair()
        self.link.setblocking(False)
        self._incomplete = b""
        with child_end:
            descriptors = {**spec.descriptors, LINK_VARIABLE: child_end.fileno()}
            # A process group of its own: Ctrl-C reaches only the supervisor, which then stops
            # the children in order.
            self._process = subprocess.Popen(
                spec.command,
                env={
                    **{
                        name: value
                        for name, value in os.environ.items()
                        if name not in spec.hidden_variables
                    },
                    **spec.environment,
                    **{name: str(number) for name, number in descriptors.items()},
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(descriptors.values()),
                process_group=0,
            )
        assert self._process.stdout is not None
        output.follow(self._process.stdout, spec.name)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def wait(self) -> None:
        """Block until it has ended."""
        self._process.wait()

    def read_beats(self, now: float) -> bool:
        """Read the beats that arrived; return False once the child has closed its end."""
        try:
            while data := self.link.recv(_MAX_BEAT_BYTES):
                self.last_beat_at = now
                *lines, rest = (self._incomplete + data).split(b"\n")
                self._incomplete = rest[-_MAX_BEAT_BYTES:]
                for line in lines:
                    self._parse_beat(line)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def signal(self, number: signal.Signals) -> None:
        """Signal the child and its own children; do nothing if it has ended."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, number)
            except (ProcessLookupError, PermissionError):
                pass  # it has just ended (macOS reports "not permitted" for a zombie)

    def hang_up(self) -> None:
        """Send SIGHUP to the child alone; do nothing if it has ended."""
        self._process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        """Release the resources of a child that has ended."""
        self.link.close()

    def _parse_beat(self, line: bytes) -> None:
        try:
            self.phase = str(json.loads(line)["phase"])
        except (ValueError, KeyError, TypeError):
            pass  # any line proves that the child is alive
