"""Exit codes, which tell the supervisor whether to restart a process."""

from __future__ import annotations

import sys

EXIT_OK = 0
EXIT_FAILED = 1
"""An unexpected error, which is in the log. The process is restarted."""
EXIT_USAGE = 2
"""An invalid flag, variable or configuration file, reported in one line on stderr."""
EXIT_STUCK = 70
"""The process made no progress and ended itself. It is restarted."""
EXIT_CONFIG = 78
"""A permanent error, reported in one line on stderr (no such model, port in use, full disk at
start). The process is not restarted.
"""


def fail(prog: str, reason: object, code: int = EXIT_CONFIG) -> int:
    """Write ``reason`` to stderr as one line of ``prog``, and return ``code``."""
    sys.stderr.write(f"{prog}: {reason}\n")
    return code
