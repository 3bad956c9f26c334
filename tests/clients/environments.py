"""A place of its own for each client: a virtual environment, or a folder of npm's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.matrix import Client

SCENARIOS = Path(__file__).parent / "scenarios"
_INSTALL_S = 1200


class NotInstalled(Exception):
    """The client could not be installed here; the message says why."""


def command_for(client: Client, root: Path) -> list[str]:
    """Installs ``client`` below ``root``, unless it is there; returns what runs its scenarios.
    Raises `NotInstalled`."""
    place = root / "".join(c if c.isalnum() else "-" for c in " ".join(client.packages))
    return _node(client, place) if client.is_node else _python(client, place)


def _python(client: Client, place: Path) -> list[str]:
    python = place / "bin" / "python"
    if not (place / "installed").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(place))
        _run(str(python), "-m", "pip", "install", "--quiet", *client.packages)
        (place / "installed").touch()
    return [str(python), str(SCENARIOS / client.script)]


def _node(client: Client, place: Path) -> list[str]:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotInstalled("there is no Node here")
    if not (place / "installed").exists():
        place.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(place)]
        _run(*npm, *client.packages)
        (place / "installed").touch()
    for script in SCENARIOS.glob("*.mjs"):  # Node looks for packages beside a script
        shutil.copy(script, place)
    return ["node", str(place / client.script)]


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"installing took more than {_INSTALL_S} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it failed without a word"]
        raise NotInstalled(f"could not be installed: {lines[-1]}")
