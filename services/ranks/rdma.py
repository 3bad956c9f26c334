"""Checks for the RDMA devices that JACCL needs, before anything is loaded."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from shared.network.hostfile import Device

LISTS_DEVICES = "ibv_devices"
"""The program of macOS 26.2 that lists them, as ``rdma_en2`` and so on, each with a number."""
TIMEOUT_S = 10.0


def lacks_rdma(row: Sequence[Device]) -> str | None:
    """Return the reason why this machine cannot be a rank of JACCL with the devices in ``row``,
    which lead to each other rank; None if it can. MLX must be importable."""
    import mlx.core as mx

    if not mx.distributed.is_available("jaccl"):
        return (
            "this MLX has no JACCL: it requires macOS 26.2 on a Mac with Thunderbolt 5, and "
            "`rdma_ctl enable` in macOS Recovery"
        )
    return missing_devices(row, listed_devices())


def missing_devices(row: Sequence[Device], listed: Sequence[str] | None) -> str | None:
    """Return a message on the devices of ``row`` that are not ``listed``. None: all are, or nothing
    is known."""
    if listed is None:
        return None
    names: set[str] = set()
    for device in row:
        names.update([device] if isinstance(device, str) else device or [])
    missing = sorted(names - set(listed))
    if not missing:
        return None
    there = ", ".join(listed) or "none"
    return f"no RDMA device {', '.join(missing)}: {LISTS_DEVICES} lists {there}"


def listed_devices() -> list[str] | None:
    """Return the names of this machine's RDMA devices, None if they cannot be listed."""
    if shutil.which(LISTS_DEVICES) is None:
        return None
    try:
        run = subprocess.run(
            [LISTS_DEVICES], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [word for word in run.stdout.split() if word.startswith("rdma_")]
