"""Where processes of the server run: one small interface, and a file for each kind of place.

`local_launcher` starts processes on this machine, `ray.launcher` engines that Ray places. The
supervisor starts, watches and stops all its children only through this interface."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class MachineNeeds:
    """The resources that a process needs from the machine it is placed on."""

    memory_bytes: int = 0  # 0: unknown
    processes: int = 1  # that share the memory, on one machine
    labels: Mapping[str, str] = field(default_factory=dict)


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
    stop_signal: int = signal.SIGTERM  # asks it to finish its work and end
    stop_stage: int = 0  # children of a lower stage end before those of the next are stopped
    announces_ready: bool = False  # the server is ready when all of these children are
    takes_hang_up: bool = False  # SIGHUP is passed on to it, once it has sent a heartbeat
    essential: bool = True  # the server ends if this child cannot start
    work: str = ""  # children with the same one take over from each other
    place: MachineNeeds | None = None  # None: this machine
    joins_as: str = ""  # what routers call it, if not by its name
    spare: tuple[str, ...] = ()
    """The command of a process that becomes this child once it receives the arguments. It has as
    many words as ``command`` has before them. Empty if there is none."""


@dataclass
class ProcessState:
    """The known state of a process. Times are from the supervisor's ``time.monotonic``."""

    started_at: float
    last_heartbeat_at: float | None = None
    phase: str = ""  # of the last heartbeat
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the last heartbeat
    reason: str = ""  # why it ends, if it has said so
    exit_code: int | None = None  # None: it runs; negative: the signal that ended it


class LaunchedProcess(Protocol):
    """A process that was started from ``spec``."""

    spec: ChildSpec
    state: ProcessState
    """As of the last `refresh`."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has said something."""

    def refresh(self, now: float) -> bool:
        """Bring ``state`` up to date, without waiting. Return False once nothing more can come."""

    def take_messages(self) -> list[Mapping[str, Any]]:
        """Return, once, the messages that arrived between heartbeats."""

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send ``message`` to the process, without waiting; return whether it was sent."""

    def stop(self, *, at_once: bool = False) -> None:
        """Ask the process to finish its work and end, or end it ``at_once`` with its children."""

    def hang_up(self) -> None:
        """Ask the process to read its configuration again."""

    def wait(self) -> None:
        """Block until the process has ended."""

    def close(self) -> None:
        """Release the resources of a process that has ended."""


class Launcher(Protocol):
    """Starts processes in one kind of place."""

    def start(self, spec: ChildSpec, now: float) -> LaunchedProcess:
        """Start a process. Raises: OSError if that is not possible now."""
