"""The faults of `tests.e2e.chaos`."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from tests.e2e.chaos.site import SUPERVISORS, Site, admin_restart, send_signal
from tests.e2e.soak.report import print_line

RECOVERED_WITHIN_S = 120.0
"""Engines that failed often wait 30 s before their next start."""
HUNG_FOR_S = 13.0
"""A process that is stopped for that long is killed by its supervisor."""
STARTED_WITHIN_S = 60.0
"""For the first start of a supervisor's engines."""


class Saboteur:
    """Injects faults, one after the other in two loops, so that two can overlap."""

    def __init__(self, site: Site, seed: int, pace: float) -> None:
        """``pace`` is a factor of the pauses between faults."""
        self._site, self._pace = site, pace
        self._chance = random.Random(seed)
        self._losing = {role: asyncio.Lock() for role in ("machine", "router", "second router")}
        self.done: Counter[str] = Counter()
        self.touched: Counter[str] = Counter()
        """How often a role was stopped, or went on."""
        self.recovered_s: defaultdict[str, list[float]] = defaultdict(list)
        self._faults: dict[Callable[[], Awaitable[str]], int] = {
            self.kill: 6,
            self.stop_for_a_while: 5,
            self.stop_until_killed: 1,
            self.replace_router: 2,
            self.cut: 3,
            self.silence: 2,
            self.remove_store: 2,
            self.fill_disk: 2 if site.has_small_disk else 0,
            self.lose_machine: 1,
            self.lose_second_router: 1,
            self.restart_engines: 1,
            self.exhaust_descriptors: 3 if hasattr(resource, "prlimit") else 0,
        }

    async def run(self, until: float) -> None:
        """Inject each kind once, then random kinds until ``until``, two at a time. Wait for
        recovery after half of them."""
        each_once = [kind for kind, weight in self._faults.items() if weight]
        self._chance.shuffle(each_once)

        async def go_on() -> None:
            while time.monotonic() < until or each_once:
                (drawn,) = self._chance.choices(list(self._faults), list(self._faults.values()))
                name = await (each_once.pop() if each_once else drawn)()
                self.done[name] += 1
                if self._chance.random() < 0.5:
                    patience_s = min(RECOVERED_WITHIN_S, max(0, until - time.monotonic()))
                    seconds = await self._site.wait_whole(patience_s)
                    if seconds is not None:  # else more has happened meanwhile
                        self.recovered_s[name].append(seconds)
                await asyncio.sleep(self._pace * self._chance.uniform(0, 3))

        async with asyncio.TaskGroup() as group:  # after an error in one, the other ends too
            group.create_task(go_on())
            group.create_task(go_on())

    def lines(self) -> list[str]:
        rows = [f"{self.done.total()} faults"]
        for name, count in sorted(self.done.items()):
            times = self.recovered_s[name]
            after = (
                f"whole again after {statistics.median(times):.1f} s, at most {max(times):.1f} s"
                if times
                else ""
            )
            rows.append(f"{name:32} {count:4}  {after}")
        return rows

    # -- kinds of faults -----------------------------------------------------------------

    async def kill(self) -> str:
        return await self._lose(self._role(), signal.SIGKILL)

    async def stop_until_killed(self) -> str:
        role = self._role()
        if role == "second router":  # it has no supervisor that would kill it
            role = "router"
        return await self._lose(role, signal.SIGSTOP)

    def _role(self, *more: str) -> str:
        """Draw a role that a process has now."""
        roles = [*self._site.roles, *more]
        self._chance.shuffle(roles)
        return next(role for role in roles if self._site.pids(role))

    async def _lose(self, role: str, number: int) -> str:
        if role == "second router":  # it has no supervisor
            return await self.lose_second_router()
        self.touched[role] += 1
        pids = self._site.send(role, number)
        self._say(f"{role} gets {signal.Signals(number).name}: {pids}")
        if number == signal.SIGSTOP:
            await asyncio.sleep(HUNG_FOR_S)
            if role in ("image decoder", "spare"):  # it is killed only if it is needed
                send_signal(pids, signal.SIGCONT)
            self.touched[role] += 1
        return f"{role} {'killed' if number == signal.SIGKILL else 'hung'}"

    async def replace_router(self) -> str:
        """Nobody may notice this."""
        async with self._losing["router"]:  # SIGTERM twice would end it at once
            pids = self._site.send("router", signal.SIGTERM)
            self._say(f"the router is told to end: {pids}")
            await self._site.wait_ended(pids)
        return "router replaced"

    async def stop_for_a_while(self) -> str:
        role = self._role(*SUPERVISORS)
        seconds = self._chance.uniform(0.2, 6)
        self.touched[role] += 1
        stopped = self._site.send(role, signal.SIGSTOP)
        self._say(f"{role} stands still for {seconds:.1f} s: {stopped}")
        try:
            await asyncio.sleep(seconds)
        finally:
            send_signal(stopped, signal.SIGCONT)
            self.touched[role] += 1
        return f"{role} stopped"

    async def exhaust_descriptors(self) -> str:
        """Let a process open nothing more for a while: no connection, file, or child. It may end,
        and is started again.

        A supervisor gives up an engine that has never been ready after a few failed starts. So this
        waits until each of its engines has been ready once; a supervisor for which that takes
        longer than `STARTED_WITHIN_S` is spared."""
        role = self._role(*SUPERVISORS)
        if role == "second router":  # it has no supervisor
            role = "router"
        seconds = self._chance.uniform(0.5, 6)
        if role in SUPERVISORS and not await self._site.wait_started(role, STARTED_WITHIN_S):
            return f"{role} spared: an engine was not ready"
        self._say(f"{role} may open nothing for {seconds:.1f} s: {self._site.pids(role)}")
        limits = {}
        for pid in self._site.pids(role):
            with suppress(OSError):  # it has ended
                open_now = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()) + 1
                limits[pid] = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now, limits[pid][1]))
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid, before in limits.items():
                with suppress(OSError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        return f"{role} without descriptors"

    async def cut(self) -> str:
        for link in self._site.links:
            self._say(f"{link.cut()} sockets are cut")
        return "sockets cut"

    async def silence(self) -> str:
        link, seconds = self._chance.choice(self._site.links), self._chance.uniform(0.5, 9)
        self._say(f"a link is silent for {seconds:.1f} s")
        link.silence(on=True)
        await asyncio.sleep(seconds)
        link.silence(on=False)
        return "sockets silent"

    async def remove_store(self) -> str:
        self._say("the store is removed")
        await asyncio.to_thread(self._site.remove_store)
        return "store removed"

    async def fill_disk(self) -> str:
        self._say("the disk is full")
        await asyncio.to_thread(self._site.fill_disk)
        await asyncio.sleep(self._chance.uniform(1, 6))
        self._site.free_disk()
        return "disk full"

    async def lose_machine(self) -> str:
        async with self._losing["machine"]:  # once at a time: each loss brings one machine back
            self._say("the other machine is lost")
            below = self._site.pids("engine elsewhere")
            self._site.joined.popen.kill()
            await asyncio.to_thread(self._site.joined.popen.wait)
            await asyncio.sleep(self._chance.uniform(0, 3))
            await self._site.wait_ended(below)
            self._site.join()
        return "other machine lost"

    async def lose_second_router(self) -> str:
        async with self._losing["second router"]:
            self._say("the second router is killed")
            await self._site.lose_second_router()
        return "second router killed"

    async def restart_engines(self) -> str:
        self._say("all engines are restarted")
        asked = await asyncio.to_thread(admin_restart, self._site.url)
        return "engines restarted" if asked else "engines not restarted: no router"

    def _say(self, what: str) -> None:
        print_line(f"  {what}")
