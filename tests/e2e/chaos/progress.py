"""What a run of `tests.e2e.chaos` prints while it goes on."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tests.e2e.chaos.load import Judge
from tests.e2e.soak.report import print_line

EVERY_S = 60.0


def resident_bytes(pid: int) -> int | None:
    listing = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    return int(listing) * 1024 if listing.strip() else None


def line(
    seconds: float,
    judge: Judge,
    faults: Counter[str],
    roles: Sequence[str],
    pids: Callable[[str], list[int]],
) -> str:
    """Return answers, faults, findings, and the memory of each process that there is now."""
    sizes = {}
    for role in roles:
        found = [resident_bytes(pid) for pid in pids(role)]
        if any(found):
            sizes[role] = sum(size or 0 for size in found) / 2**20
    memory = ", ".join(f"{role} {size:.0f}" for role, size in sizes.items())
    answers, right = judge.outcomes.total(), judge.outcomes["right"]
    return (
        f"{seconds / 60:.1f} min: {answers} answers, {right} of them whole and right, "
        f"{faults.total()} faults, {len(judge.findings)} wrong; MB: {memory}"
    )


async def print_progress(
    until: float,
    judge: Judge,
    faults: Counter[str],
    roles: Sequence[str],
    pids: Callable[[str], list[int]],
    every_s: float = EVERY_S,
) -> None:
    """Print a line each minute until ``until``, a time of `time.monotonic`."""
    begin = time.monotonic()
    while (left_s := until - time.monotonic()) > 0:
        await asyncio.sleep(min(every_s, left_s))
        seconds = time.monotonic() - begin
        print_line(await asyncio.to_thread(line, seconds, judge, faults, roles, pids))
