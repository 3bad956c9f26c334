"""Real agents, each installed from npm or PyPI into a directory of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.agents.scripts import Agent
from tests.e2e.installing import NotInstalled, run


def install(agent: Agent, root: Path) -> Path:
    """Return the directory of the agent's command, which is below ``root``. Raises
    `NotInstalled`."""
    directory = root / agent.name
    found = binaries(agent, root)
    if (found / agent.name).exists():
        return found
    directory.mkdir(parents=True, exist_ok=True)
    if agent.from_pypi:
        run(sys.executable, "-m", "venv", "--clear", str(directory / ".venv"))
        run(str(found / "python"), "-m", "pip", "install", "--quiet", agent.package)
        return found
    if shutil.which("npm") is None:
        raise NotInstalled("there is no npm here")
    quiet = ("--silent", "--no-audit", "--no-fund", "--prefix", str(directory))
    run("npm", "install", *quiet, agent.package)
    return found


def binaries(agent: Agent, root: Path) -> Path:
    """Return where the agent's command is once it is installed below ``root``."""
    return root / agent.name / (".venv/bin" if agent.from_pypi else "node_modules/.bin")


def version(agent: Agent, found: Path) -> str:
    """Return the version of the command in the directory ``found``."""
    command = [str(found / agent.name), "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    number = re.search(r"\d+\.\d+\.\d+", shown)
    return number[0] if number else "?"
