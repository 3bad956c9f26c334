"""What processes get of this one's environment, which may have secrets."""

from __future__ import annotations

import os

from shared.paths import python_path

_NAMES = frozenset(
    "PATH HOME USER LOGNAME SHELL TMPDIR TZ LANG LANGUAGE LD_LIBRARY_PATH DYLD_LIBRARY_PATH"
    " DYLD_FALLBACK_LIBRARY_PATH VIRTUAL_ENV XDG_CACHE_HOME XDG_RUNTIME_DIR HF_HOME HF_HUB_CACHE"
    " HF_HUB_OFFLINE COVERAGE_PROCESS_START".split()
)
_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "TRANSFORMERS_")


def sandbox_environment() -> dict[str, str]:
    """Return the environment of a process that handles untrusted input: where programs and files
    are, and nothing else."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }
    return {**kept, "PYTHONPATH": python_path()}
