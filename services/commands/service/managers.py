"""The service managers of users: launchd on macOS, systemd on Linux.

Both write one file and call one program (`launchctl`, `systemctl --user`). Only the user can read
the file, because a server's flags and variables may be secrets.
"""

from __future__ import annotations

import os
import plistlib
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.supervision.bounded_log import LAUNCHD_LOG_VARIABLE
from shared.exits import EXIT_CONFIG, EXIT_USAGE

_RESTART_AFTER_S = 10
_POLL_S = 0.1


class ServiceError(Exception):
    """The service could not be changed; the message is one line for the user."""


@dataclass(frozen=True)
class ServiceSpec:
    """A command to keep running."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    stop_s: float
    """Seconds that stopping may take before the processes are killed."""


class ServiceManager(Protocol):
    """One service, by its name."""

    @property
    def file(self) -> Path:
        """The definition file, which exists if the service is installed."""

    def install(self, spec: ServiceSpec) -> None:
        """Write the definition and start or restart the service. Raises `ServiceError`."""

    def uninstall(self) -> None:
        """Stop the service and remove its definition. Raises `ServiceError`."""

    def state(self) -> tuple[bool, str]:
        """Return whether it is running, and its state in words."""

    def logs(self, lines: int, *, follow: bool) -> Sequence[str]:
        """Return the command that prints the last ``lines``, and new ones with ``follow``."""


class Systemd:
    """A user unit (systemd.service(5))."""

    def __init__(self, name: str, home: Path) -> None:
        self._unit = f"{name}.service"
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        self.file = config / "systemd" / "user" / self._unit

    def install(self, spec: ServiceSpec) -> None:
        _write(self.file, _unit_text(spec).encode())
        _run("systemctl", "--user", "daemon-reload")
        _run("systemctl", "--user", "enable", self._unit)
        _run("systemctl", "--user", "restart", self._unit)

    def uninstall(self) -> None:
        _run("systemctl", "--user", "disable", "--now", self._unit)
        self.file.unlink()
        _run("systemctl", "--user", "daemon-reload")

    def state(self) -> tuple[bool, str]:
        wanted = "ActiveState,SubState,MainPID,ExecMainStatus"
        shown = _run("systemctl", "--user", "show", self._unit, f"--property={wanted}")
        found = dict(line.partition("=")[::2] for line in shown.splitlines())
        state = found.get("ActiveState", "unknown")
        if state == "active":
            return True, f"running, process {found.get('MainPID')}"
        exited = found.get("ExecMainStatus")
        return False, f"{state} ({found.get('SubState')}), last exit code {exited}"

    def logs(self, lines: int, *, follow: bool) -> Sequence[str]:
        command = ["journalctl", "--user", f"--unit={self._unit}", f"--lines={lines}"]
        return [*command, "--follow"] if follow else [*command, "--no-pager"]


class Launchd:
    """An agent of the logged-in user (launchd.plist(5))."""

    def __init__(self, name: str, home: Path) -> None:
        self._label = name
        self._domain = f"gui/{os.getuid()}"
        self.file = home / "Library" / "LaunchAgents" / f"{name}.plist"
        self.log = home / "Library" / "Logs" / f"{name}.log"

    def install(self, spec: ServiceSpec) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self._boot_out()
        _write(self.file, plistlib.dumps(self._definition(spec), sort_keys=False))
        _run("launchctl", "bootstrap", self._domain, str(self.file))

    def uninstall(self) -> None:
        self._boot_out()
        self.file.unlink()

    def state(self) -> tuple[bool, str]:
        try:
            printed = _run("launchctl", "print", self._target)
        except ServiceError:
            return False, "not loaded"
        found: dict[str, str] = {}
        for line in printed.splitlines():
            name, separator, value = line.strip().partition(" = ")
            if separator:
                found.setdefault(name, value)  # later entries belong to sockets and events
        state = found.get("state", "unknown")
        if state == "running":
            return True, f"running, process {found.get('pid')}"
        return False, f"{state}, last exit code {found.get('last exit code', 'none')}"

    def logs(self, lines: int, *, follow: bool) -> Sequence[str]:
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self.log)]

    @property
    def _target(self) -> str:
        return f"{self._domain}/{self._label}"

    def _boot_out(self) -> None:
        """Stop the service and wait for its end; it cannot be restarted before that."""
        stop_s = 60.0
        with suppress(OSError, ValueError):  # what it was installed with
            stop_s = plistlib.loads(self.file.read_bytes()).get("ExitTimeOut", stop_s)
        deadline = time.monotonic() + stop_s + _RESTART_AFTER_S
        try:
            _run("launchctl", "bootout", self._target)
        except ServiceError:
            pass  # not loaded or already ending, as the loop finds out
        while self.state()[1] != "not loaded":
            if time.monotonic() > deadline:
                raise ServiceError(f"{self._label} does not stop")
            time.sleep(_POLL_S)

    def _definition(self, spec: ServiceSpec) -> dict[str, object]:
        return {
            "Label": self._label,
            "ProgramArguments": list(spec.command),
            "EnvironmentVariables": {**spec.environment, LAUNCHD_LOG_VARIABLE: str(self.log)},
            "WorkingDirectory": str(spec.directory),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_AFTER_S,
            "ExitTimeOut": round(spec.stop_s),
            "ProcessType": "Interactive",  # other types get less CPU and disk bandwidth
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }


def _unit_text(spec: ServiceSpec) -> str:
    environment = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in spec.environment.items()
    )
    command = " ".join(_quoted(part).replace("$", "$$") for part in spec.command)
    directory = str(spec.directory).replace("%", "%%")
    return f"""\
[Unit]
Description=mlx-lm-server
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
WorkingDirectory={directory}
{environment}Restart=on-failure
RestartSec={_RESTART_AFTER_S}
RestartPreventExitStatus={EXIT_USAGE} {EXIT_CONFIG}
KillMode=mixed
OOMPolicy=continue
TimeoutStopSec={round(spec.stop_s)}

[Install]
WantedBy=default.target
"""


def _quoted(text: str) -> str:
    """Quote as in systemd.syntax(7); percent signs start specifiers."""
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("%", "%%")):
        text = text.replace(character, escaped)
    return f'"{text}"'


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.new")
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        aside.replace(path)
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from None


def _run(*command: str) -> str:
    """Return the output of ``command``. Raises `ServiceError`."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise ServiceError(f"cannot run {command[0]}: {error.strerror}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ServiceError(f"`{' '.join(command)}` exited with {done.returncode}: {said}")
    return done.stdout
