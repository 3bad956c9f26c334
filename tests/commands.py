"""Commands as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from services.commands import cli

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120


def exit_code_of(*words: str) -> int:
    """Run a command in this process, and return its exit code."""
    try:
        return cli.main(words)
    except SystemExit as ended:
        return int(str(ended.code))


def run_command(
    *words: str, module: str = "mlx_lm_server", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Of our settings it has only those in ``environment``."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith("MLX_LM_SERVER_")}
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**outside, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
