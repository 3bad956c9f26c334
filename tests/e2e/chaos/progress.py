"""What a run of `tests.e2e.chaos` prints while it goes on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tests.e2e.chaos.load import Judge
from tests.e2e.server import ps
from tests.e2e.soak.report import print_line

EVERY_S = 60.0


def resident_bytes(pid: int) -> int | None:
    listing = ps("-o", "rss=", "-p", str(pid))
    return int(listing) * 1024 if listing.strip() else None


def memory(roles: Sequence[str], pids: Callable[[str], list[int]]) -> str:
    """Return the megabytes of each process that there is now."""
    parts = []
    for role in roles:
        found = [resident_bytes(pid) or 0 for pid in pids(role)]
        if any(found):
            parts.append(f"{role} {sum(found) / 2**20:.0f}")
    return ", ".join(parts)


async def print_progress(
    until: float,
    judge: Judge,
    faults: Counter[str],
    roles: Sequence[str],
    pids: Callable[[str], list[int]],
) -> None:
    """Print a line each minute until ``until``, a time of `time.monotonic`: answers, faults,
    findings and memory."""
    begin = time.monotonic()
    while (left_s := until - time.monotonic()) > 0:
        await asyncio.sleep(min(EVERY_S, left_s))
        minutes = (time.monotonic() - begin) / 60
        megabytes = await asyncio.to_thread(memory, roles, pids)
        answers, right = judge.outcomes.total(), judge.outcomes["right"]
        print_line(
            f"{minutes:.1f} min: {answers} answers, {right} of them whole and right, "
            f"{faults.total()} faults, {len(judge.findings)} wrong; MB: {megabytes}"
        )
