"""The memory of this machine, or the part of it that a container may use."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of the control groups of version 2 and 1."""


def machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_bytes() -> int:
    """Return the memory of the machine, or the limit of this container if that is less."""
    return min(machine_bytes(), container_limit_bytes() or machine_bytes())


def container_limit_bytes() -> int | None:
    """Return the limit of this process's container, None if it has none."""
    for name in _LIMITS:
        try:
            return int((CGROUP / name).read_text())
        except (OSError, ValueError):
            continue
    return None
