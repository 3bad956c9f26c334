"""Exit codes, by which a process tells the supervisor whether to restart it."""

from __future__ import annotations

import sys

EXIT_OK = 0
EXIT_FAILED = 1
"""An unexpected error, which is in the log. Restarted."""
EXIT_USAGE = 2
"""An invalid flag, variable or configuration file, after one line on stderr."""
EXIT_STUCK = 70
"""The process made no progress and ended itself. Restarted."""
EXIT_CONFIG = 78
"""A permanent error, after one clear line on stderr (no such model, port in use, full
disk at start). Not restarted."""


def fail(prog: str, reason: object, code: int = EXIT_CONFIG) -> int:
    """Write ``reason`` to stderr as one line of ``prog``, and return ``code``."""
    sys.stderr.write(f"{prog}: {reason}\n")
    return code
