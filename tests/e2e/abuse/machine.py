"""Whether a router's event loop or the machine itself stands still. Of the machine, a process that
only sleeps is then woken late, or a thread that has work waits for a processor.

A module of its own, since processes cannot be started with functions of a main module.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from router.fleet.metrics.loop_lag import EVERY_S

_BUCKET = re.compile(r'mlx_lm_server_event_loop_lag_seconds_bucket{le="([^"]+)"} (\S+)')


def count_stalls(metrics: str, stall_s: float) -> int:
    """Return how often a router's event loop was later than ``stall_s``, a bucket's bound."""
    buckets = dict(_BUCKET.findall(metrics))
    return int(float(buckets["+Inf"]) - float(buckets[str(stall_s)]))


def waited_s(pid: int) -> float:
    """Return how long the main thread of a process has waited for a processor so far; 0 where the
    system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _count_late_wakes(late_s: float, count: Synchronized[int]) -> None:
    """Sleep as the event loop's own measurement does, and count how often that is much longer."""
    while True:
        due = time.monotonic() + EVERY_S
        time.sleep(EVERY_S)
        count.value += time.monotonic() - due > late_s


@contextmanager
def counting_late_wakes(late_s: float) -> Iterator[Synchronized[int]]:
    """Yield the number of wakes that were later than ``late_s``."""
    context = multiprocessing.get_context("spawn")
    count = context.Value("i")
    process = context.Process(target=_count_late_wakes, args=(late_s, count), daemon=True)
    process.start()
    try:
        yield count
    finally:
        assert process.is_alive(), "late wakes were not counted"
        process.kill()
        process.join()
