"""Installation of other programs for tests: clients and coding agents."""

from __future__ import annotations

import subprocess

_INSTALL_S = 1200


class NotInstalled(Exception):
    """A program could not be installed. The message says why."""


def run(*command: str) -> None:
    """Run a command of an installation. Raises: `NotInstalled`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"installing took more than {_INSTALL_S} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it failed without a message"]
        raise NotInstalled(f"could not be installed: {lines[-1]}")
