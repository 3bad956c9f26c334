"""Variables in the environment of engines: settings of glibc's allocator, for huge pages and for
keeping freed memory, and of MLX on Metal.

The first touch of a 4 KB page causes a fault, which in a virtual machine may take longer than
computing its content. glibc reads these settings when a process starts, so they must be in the
environment of an engine. Other systems ignore them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"

_METAL = {"MLX_MAX_MB_PER_BUFFER": "256"}
"""MLX submits work whenever the arrays in use are larger than this, and counts those of pages as a
whole. With its default, nearly every layer of a step would be submitted alone."""

_TUNABLES = {
    "glibc.malloc.hugetlb": 1,  # request huge pages if the system leaves the choice to programs
    # Large arrays come from the heap too. With pages of their own they would be returned and
    # faulted in again, and would cross the boundaries of huge pages.
    "glibc.malloc.mmap_threshold": 1 << 30,
    "glibc.malloc.trim_threshold": 1 << 32,
    "glibc.malloc.top_pad": 64 << 20,
}


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return variables to add to the environment ``given`` of an engine, except those already set
    in it."""
    wanted = {VARIABLE: ":".join(f"{name}={value}" for name, value in _TUNABLES.items())}
    if sys.platform == "darwin":
        wanted |= _METAL
    return {name: value for name, value in wanted.items() if name not in given}


def give_back() -> None:
    """Return free memory to the system, which glibc does not do by itself with these settings."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
