"""An environment for each client: a virtual environment of Python, or a folder for npm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.matrix import Client

SCENARIOS = Path(__file__).parent / "scenarios"
_INSTALL_S = 1200


class NotInstalled(Exception):
    """The client could not be installed. The message says why."""


def command_for(client: Client, root: Path) -> list[str]:
    """Install ``client`` below ``root`` unless it is installed there. Return the command that runs
    its scenarios. Raises `NotInstalled`."""
    directory = root / "".join(c if c.isalnum() else "-" for c in " ".join(client.packages))
    return _node(client, directory) if client.is_node else _python(client, directory)


def _python(client: Client, directory: Path) -> list[str]:
    python = directory / "bin" / "python"
    if not (directory / "installed").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(directory))
        _run(str(python), "-m", "pip", "install", "--quiet", *client.packages)
        (directory / "installed").touch()
    return [str(python), str(SCENARIOS / client.script)]


def _node(client: Client, directory: Path) -> list[str]:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotInstalled("there is no Node here")
    if not (directory / "installed").exists():
        directory.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory)]
        _run(*npm, *client.packages)
        (directory / "installed").touch()
    for script in SCENARIOS.glob("*.mjs"):  # Node looks for packages beside a script
        shutil.copy(script, directory)
    return ["node", str(directory / client.script)]


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"installing took more than {_INSTALL_S} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it failed without a message"]
        raise NotInstalled(f"could not be installed: {lines[-1]}")
