"""The event loops of `tests.e2e.chaos`: hostile clients must not make a router stand still."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import httpx

from tests.e2e.abuse.machine import count_stalls, counting_late_wakes
from tests.e2e.chaos.load import Judge
from tests.e2e.chaos.site import Site

STALL_S = 1.0
"""A delay of the event loop that is wrong. A bucket of the router's own histogram."""
LATE_S = 0.2
"""A process that only sleeps is not woken later, or the machine has no time for the router."""
EVERY_S = 1.0


@dataclass(frozen=True)
class Sample:
    """What is known of a router at some time. Numbers count from its start."""

    pids: tuple[int, ...]
    stalls: int
    late_wakes: int
    faults: int
    """Those that stop this router, or let it go on."""


def stood_still(samples: deque[Sample]) -> bool:
    """Return whether the event loop stood still before the last sample, for no known reason."""
    if len(samples) < 2:
        return False
    first, before, now = samples[0], samples[-2], samples[-1]
    return (
        first.pids == now.pids
        and now.stalls > before.stalls
        and (now.late_wakes, now.faults) == (first.late_wakes, first.faults)
    )


class StallWatch:
    """Reads both routers' metrics each second."""

    def __init__(self, site: Site, judge: Judge, faults: Counter[str]) -> None:
        """``faults`` counts by role."""
        self._site, self._judge, self._faults = site, judge, faults
        self.judged = 0
        """Seconds of a router that were judged."""

    async def run(self, until: float) -> None:
        endpoints = {
            "router": self._site.first_endpoint.url,
            "second router": self._site.second_endpoint.url,
        }
        known: defaultdict[str, deque[Sample]] = defaultdict(lambda: deque(maxlen=4))
        with counting_late_wakes(LATE_S) as late_wakes:
            async with httpx.AsyncClient(timeout=10) as client:
                while time.monotonic() < until:
                    for role, url in endpoints.items():
                        try:
                            text = (await client.get(f"{url}/metrics")).text
                        except httpx.HTTPError:
                            known.pop(role, None)
                            continue
                        pids = tuple(await asyncio.to_thread(self._site.pids, role))
                        stalls, faults = count_stalls(text, STALL_S), self._faults[role]
                        known[role].append(Sample(pids, stalls, late_wakes.value, faults))
                        if stood_still(known[role]):
                            self._judge.find(f"the event loop of {role} stood still for a second")
                        self.judged += known[role][0].late_wakes == late_wakes.value
                    await asyncio.sleep(EVERY_S)
