"""`mlx-lm-server service`: run the server as a user service of launchd or systemd."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from services.commands.parser import CommandParser
from services.commands.service.managers import (
    Launchd,
    ServiceError,
    ServiceManager,
    ServiceSpec,
    Systemd,
)
from services.supervision.local import GRACE_S
from shared import settings
from shared.exits import EXIT_FAILED, EXIT_OK, EXIT_USAGE, fail
from shared.paths import python_path

PROG = "mlx-lm-server service"
_COMMANDS = ("serve", "engine", "router", "kvstore")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LAST_S = 20
"""Seconds that engines and kvstore get after the router has stopped, before everything
is killed."""


def main(argv: Sequence[str], platform: str = sys.platform) -> int:
    """Run the command in ``argv`` with the service manager of ``platform``; return the
    exit code."""
    own = parser()
    options, rest = own.parse_known_args(argv)
    if rest and options.command != "install":
        own.error(f"unrecognized arguments: {' '.join(rest)}")
    if not _NAME.fullmatch(options.name):
        own.error("--name: letters, digits, '.', '_' and '-' only")
    managers: dict[str, type[Launchd | Systemd]] = {"darwin": Launchd, "linux": Systemd}
    if platform not in managers:
        return fail(PROG, f"services are not supported on {platform}", EXIT_FAILED)
    manager: ServiceManager = managers[platform](options.name, Path.home())
    try:
        if options.command == "install":
            manager.install(_spec(rest, options.env))
            return _say(f"{options.name} is installed and started: {manager.file}")
        if not manager.file.exists():
            raise ServiceError(f"{options.name} is not installed (no {manager.file})")
        if options.command == "uninstall":
            manager.uninstall()
            return _say(f"{options.name} is stopped and removed")
        if options.command == "logs":
            return _show(manager.logs(options.lines, follow=options.follow))
        is_running, text = manager.state()
        return _say(f"{options.name}: {text}", EXIT_OK if is_running else EXIT_FAILED)
    except ServiceError as error:
        return fail(PROG, error, EXIT_FAILED)


def _spec(argv: Sequence[str], variables: Sequence[str]) -> ServiceSpec:
    """Return the command to run. Invalid flags end this command as they would end the server."""
    command = argv[0] if argv and not argv[0].startswith("-") else "serve"
    if command not in _COMMANDS:
        reason = f"{command!r} cannot run as a service; use one of {', '.join(_COMMANDS)}"
        raise SystemExit(fail(PROG, reason, EXIT_USAGE))
    environment = {}
    for variable in variables:
        name, separator, environment[name] = variable.partition("=")
        if not separator or not _VARIABLE.fullmatch(name):
            raise SystemExit(fail(PROG, "--env: expected NAME=VALUE", EXIT_USAGE))
    flags = list(argv[1:] if argv[:1] == [command] else argv)
    found = settings.parse(flags, environment, PROG)
    return ServiceSpec(
        command=[sys.executable, "-P", "-m", "mlx_lm_server", command, *flags],
        environment={"PYTHONPATH": python_path(), **environment},
        directory=Path.cwd(),
        stop_s=found.pre_stop_delay_s + found.drain_timeout_s + GRACE_S + _LAST_S,
    )


def _say(text: str, code: int = EXIT_OK) -> int:
    sys.stdout.write(f"{text}\n")
    return code


def _show(command: Sequence[str]) -> int:
    try:
        return EXIT_OK if subprocess.run(command).returncode == 0 else EXIT_FAILED
    except OSError as error:
        return fail(PROG, f"cannot run {command[0]}: {error.strerror}", EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_OK


def parser() -> argparse.ArgumentParser:
    common = CommandParser(add_help=False)
    common.add_argument(
        "--name", default="mlx-lm-server", help="name of the service (default: mlx-lm-server)"
    )
    made = CommandParser(
        prog=PROG,
        description="Run the server as a service of the current user: a launchd agent on macOS, "
        "a systemd user unit on Linux.",
        epilog="Exit codes: 0 done (status: running), 1 failed (status: not running), 2 invalid "
        "arguments.",
    )
    commands = made.add_subparsers(metavar="COMMAND", required=True, dest="command")

    def command(name: str, help: str, usage: str | None = None) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, parents=[common], help=help, description=help, usage=usage, allow_abbrev=False
        )

    install = command(
        "install",
        "start a server now, at each login and after a crash; replaces an existing service",
        f"{PROG} install [--name NAME] [--env NAME=VALUE]... [serve|engine|router|kvstore] [flags]",
    )
    install.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the service, which does not inherit the shell's; repeatable",
    )
    command("status", "show whether the service is running")
    logs = command("logs", "print the service's log")
    logs.add_argument("-n", "--lines", type=int, default=100, help="number of lines (default: 100)")
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    command("uninstall", "stop it gracefully, and remove it")
    return made
