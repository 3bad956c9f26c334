"""An environment for each client: a virtual environment of Python, or a folder for npm."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.clients.matrix import Client
from tests.e2e.installing import NotInstalled, run

SCENARIOS = Path(__file__).parent / "scenarios"


def command_for(client: Client, root: Path) -> list[str]:
    """Install ``client`` below ``root`` unless it is installed there. Return the command that runs
    its scenarios. Raises `NotInstalled`."""
    name = "".join(c if c.isalnum() else "-" for c in " ".join(client.packages))
    directory = root / (name or "nothing")
    return _node(client, directory) if client.is_node else _python(client, directory)


def _python(client: Client, directory: Path) -> list[str]:
    python = directory / "bin" / "python"
    if not (directory / "installed").exists():
        run(sys.executable, "-m", "venv", "--clear", str(directory))
        if client.packages:
            run(str(python), "-m", "pip", "install", "--quiet", *client.packages)
        (directory / "installed").touch()
    return [str(python), str(SCENARIOS / client.script)]


def _node(client: Client, directory: Path) -> list[str]:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotInstalled("there is no Node here")
    if not (directory / "installed").exists():
        directory.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(directory)]
        run(*npm, *client.packages)
        (directory / "installed").touch()
    for script in SCENARIOS.glob("*.mjs"):  # Node looks for packages beside a script
        shutil.copy(script, directory)
    return ["node", str(directory / client.script)]
