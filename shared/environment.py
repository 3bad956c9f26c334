"""What processes get of this one's environment, which may have secrets."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any

from shared.paths import python_path

HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""The variables of huggingface_hub with a user's token. Only processes that download need them."""

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


def environment_without(
    names: Collection[str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def forget(names: Collection[str]) -> None:
    """Remove the variables ``names`` from the environment of this process, also from what the
    system shows of it to other processes of the same user."""
    environ = _environ()
    for number in itertools.count():
        entry = environ[number]
        if entry is None:
            break
        name, separator, value = ctypes.string_at(entry).partition(b"=")
        if os.fsdecode(name) in names:
            ctypes.memset(entry + len(name) + len(separator), 0, len(value))
    for secret in names:
        os.environ.pop(secret, None)


def _environ() -> Any:
    """Return the variables of the C library, which end with a null pointer."""
    library = ctypes.CDLL(None)
    if sys.platform == "darwin":  # libraries do not see the symbol
        library._NSGetEnviron.restype = ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))
        return library._NSGetEnviron().contents
    return ctypes.POINTER(ctypes.c_void_p).in_dll(library, "environ")
