"""Everything at once, while processes die and stop, sockets are cut and disks are lost:
`python -m tests.e2e.chaos --seconds 3600 --seed 1`.

Six models (one with adapters and drafts, one with recurrent layers, one that embeds, one that takes
images, one on two ranks, one loaded on demand) serve the clients of several keys, batches, and
hostile clients. One model has another engine elsewhere, which serves a second router too.
Every answer must be the one that the undisturbed server gave, or a documented error. Nothing may
hang, nothing be answered twice, and nothing be left at the end. In the last third of a long run
nothing is disturbed, and the memory of no process may grow.

A line each minute tells how far it is: answers, faults, what is wrong, and memory.

Limits are in time awake: all of it may be stopped (SIGSTOP) for minutes, as by a machine that
sleeps.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import httpx

from services.commands.cache import main as cache_command
from tests.e2e.awake import awake_s
from tests.e2e.chaos.batches import Batches
from tests.e2e.chaos.faults import RECOVERED_WITHIN_S, Saboteur
from tests.e2e.chaos.hostile import Hostile
from tests.e2e.chaos.load import HUNG_S, Clients, Judge, learn
from tests.e2e.chaos.progress import print_progress, resident_bytes
from tests.e2e.chaos.questions import Question, Reply, make_questions
from tests.e2e.chaos.site import (
    KEYS,
    LIMITED,
    SELDOM,
    SHARED,
    SUPERVISORS,
    Site,
    mount_small_disk,
    unmount,
)
from tests.e2e.chaos.stalls import StallWatch
from tests.e2e.server import private_directory, ps
from tests.e2e.soak.__main__ import IDLE_WITHIN_S, wait_idle
from tests.e2e.soak.report import grows, open_files, print_line, thirds
from tests.forked.process import FORKS_VARIABLE
from tests.text_models import make_text_model
from tests.tiny_models import Kind, make_adapter, make_tiny
from tests.vision_models import make_vision_model

CLIENTS_A_KEY = 2
LONG_S = 600.0
"""A run of this length has a part without faults, in which memory is measured."""
SAMPLE_EVERY_S = 2.0
OPTIONAL = (f"engine {SELDOM}", "image decoder", "spare")
"""Roles with any number of processes, including none."""
IN_NAMESPACE = "_CHAOS_IN_NAMESPACE"
PEER_LOST, NO_DESCRIPTOR = "connection to a peer was lost", "Too many open files"
"""What the log says of a rank that was killed, and of a process without descriptors."""
GROWTH_BYTES, MORE_FILES = 64 * 2**20, 16
"""Allowed growth of a process between the first and the last check: memory, and open files."""
ROUTER_GROWTH_BYTES = 400 * 2**20
"""The same for a router, whose heap has held hostile requests."""


class Chaos:
    """One run on ``site``. ``pace`` is a factor of the pauses of clients, ``fault_pace`` of those
    between faults."""

    def __init__(
        self, site: Site, seconds: float, seed: int, pace: float, fault_pace: float
    ) -> None:
        self.site, self.seconds, self.seed, self.pace = site, seconds, seed, pace
        self.judge = Judge()
        self.saboteur = Saboteur(site, seed, fault_pace)
        self.stalls = StallWatch(site, self.judge, self.saboteur.touched)
        self.hostile: Hostile
        self.memory: defaultdict[str, list[int]] = defaultdict(list)
        self.answers: list[tuple[Question, Reply]] = []

    def run(self) -> None:
        with self.site.running():
            asyncio.run(self._run())
        self._check_after_the_end()

    async def _run(self) -> None:
        site, judge = self.site, self.judge
        for link in site.links:
            await link.start()
        site.start_second_router()
        site.join()
        try:
            assert await site.wait_whole(240) is not None, site.server.log[-30:]
            names = (*site.models, *site.adapters)
            is_short = self.seconds < LONG_S  # learning would take longer than the run
            questions = make_questions(names, self.seed, is_short=is_short)
            self.answers = await asyncio.to_thread(
                learn, site.url, f"sk-{KEYS[0]}", questions, site.gives_same_bits
            )
            exact = {question.body["model"] for question, reply in self.answers if reply.scores}
            print_line(f"log-probabilities are compared of {', '.join(sorted(exact))}")
            print_line(f"{len(self.answers)} of {len(questions)} questions are asked")
            if missing := {*names} - {question.body["model"] for question, _ in self.answers}:
                judge.find(f"no clear answer of {missing}")
            if not is_short:
                await self._ask_all()
            before = self._sizes()
            await self._disturb()
            if await site.wait_whole(RECOVERED_WITHIN_S) is None:
                judge.find(f"not whole again: {site.server.client.get('/health').text}")
            await self._load_seldom()
            wrong = judge.outcomes.total() - judge.outcomes["right"]
            await self._ask_all()
            if judge.outcomes.total() - judge.outcomes["right"] != wrong:
                judge.find(f"not all is answered once it is over: {judge.outcomes}")
            await wait_idle(site.server, judge.find)
            await self._wait_drained(site.roles)
            self._check_sizes(before, self._sizes())
        finally:
            if any(codes := await asyncio.to_thread(site.leave)):
                judge.find(f"engines from elsewhere and the second router ended with {codes}")
            for link in site.links:
                link.close()

    async def _disturb(self) -> None:
        site, seed, pace = self.site, self.seed, self.pace
        ends = time.monotonic() + self.seconds
        at_second = [each for each in self.answers if each[0].body["model"] in self._shared_names]
        clients = [
            *(
                Clients(site.first_endpoint, key, self.judge, self.answers, seed, pace)
                for key in KEYS
            ),
            Clients(site.first_endpoint, LIMITED, self.judge, self.answers, seed, pace),
            Clients(site.second_endpoint, KEYS[0], self.judge, at_second, seed, pace),
        ]
        batches = Batches(site, self.judge, self.answers, seed)
        self.hostile = Hostile(site, self.judge, seed)
        async with asyncio.TaskGroup() as group:
            try:
                for each in clients:
                    group.create_task(each.run(CLIENTS_A_KEY))
                group.create_task(batches.run(pace))
                group.create_task(asyncio.to_thread(self.hostile.run, pace))
                group.create_task(self.stalls.run(ends))
                roles = (*site.roles, *SUPERVISORS)
                group.create_task(
                    print_progress(ends, self.judge, self.saboteur.done, roles, site.pids)
                )
                calm_s = self.seconds / 3 if self.seconds >= LONG_S else 0
                await self.saboteur.run(ends - calm_s)
                if calm_s:
                    await self._watch_memory(ends)
            finally:  # also after an error: no thread can be cancelled
                batches.is_over = self.hostile.is_over = True
                for each in clients:
                    each.is_over = True
        for each in clients:
            await each.close()

    @property
    def _shared_names(self) -> tuple[str, ...]:
        return (SHARED, *self.site.adapters)

    async def _watch_memory(self, until: float) -> None:
        """Record the memory of each process. None may end, and none may grow."""
        await self.site.wait_whole(RECOVERED_WITHIN_S)
        roles = [*(role for role in self.site.roles if role not in OPTIONAL), *SUPERVISORS]
        await self._wait_drained(roles)
        pids = {role: self.site.pids(role) for role in roles}
        print_line("no more faults")
        while time.monotonic() < until:
            for role, (pid, *_) in ((role, found) for role, found in pids.items() if found):
                if size := resident_bytes(pid):
                    self.memory[role].append(size)
            await asyncio.sleep(SAMPLE_EVERY_S)
        if pids != (now := {role: self.site.pids(role) for role in roles}):
            self.judge.find(f"processes without faults were {pids}, now they are {now}")
        for role, sizes in self.memory.items():
            if grows(sizes):
                self.judge.find(f"the memory of {role} grows")

    async def _wait_drained(self, roles: Sequence[str]) -> None:
        """Wait until none of ``roles`` has two processes: of these, one was replaced."""
        deadline = awake_s() + RECOVERED_WITHIN_S
        while any(len(self.site.pids(role)) > 1 for role in roles) and awake_s() < deadline:
            await asyncio.sleep(1)

    async def _load_seldom(self) -> None:
        """Ask `SELDOM` until it answers. Its engine may have failed often, and wait for its next
        start; `Site.wait_whole` does not wait for it."""
        asked = [each for each, _ in self.answers if each.body["model"] == SELDOM]
        if not asked:
            return  # a finding already
        headers = {"authorization": f"Bearer sk-{KEYS[0]}"}
        deadline = awake_s() + RECOVERED_WITHIN_S
        async with httpx.AsyncClient(
            base_url=self.site.url, timeout=HUNG_S, headers=headers
        ) as client:
            while True:
                answer = await client.post(asked[0].path, json=asked[0].body)
                if answer.status_code == 200:
                    return
                if awake_s() > deadline:
                    self.judge.find(f"{SELDOM} is not loaded again: {answer.text}")
                    return
                await asyncio.sleep(1)

    async def _ask_all(self) -> None:
        """Ask every question once, several at a time."""
        asking = Clients(self.site.first_endpoint, KEYS[1], self.judge, self.answers, self.seed)
        places = asyncio.Semaphore(6)

        async def ask(question: Question, expected: Reply) -> None:
            async with places:
                await asking.ask(question, expected, None)

        await asyncio.gather(*(ask(*each) for each in self.answers))
        await asking.close()

    # -- what is left ----------------------------------------------------------------------

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return the resident bytes and the open files of each process, by what it does."""
        found = {}
        for role in (*self.site.roles, *SUPERVISORS):
            pids = self.site.pids(role)
            if len(pids) != 1 and role not in OPTIONAL:
                self.judge.find(f"processes that are {role}: {pids}")
            if len(pids) == 1 and (size := resident_bytes(pids[0])):
                found[role] = size, open_files(pids[0])
        return found

    def _check_sizes(
        self, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
    ) -> None:
        for role in before.keys() & after.keys():
            (size, files), (later_size, later_files) = before[role], after[role]
            print_line(
                f"{role:22} {size / 2**20:4.0f} -> {later_size / 2**20:4.0f} MB,"
                f" {files} -> {later_files} open files"
            )
            growth_bytes = ROUTER_GROWTH_BYTES if "router" in role else GROWTH_BYTES
            if later_size > size + growth_bytes or later_files > files + MORE_FILES:
                self.judge.find(f"{role} has grown")

    def _check_after_the_end(self) -> None:
        site, judge = self.site, self.judge
        logs = {
            "server": site.server.log,
            "elsewhere": site.joined.log,
            "second router": site.second.log,
        }
        for name, log in logs.items():
            for number, line in enumerate(log):
                if re.search(r"Traceback|internal error|^\S+ critical ", line):
                    around = log[max(0, number - 5) : number + 40]
                    if any(PEER_LOST in each or NO_DESCRIPTOR in each for each in around):
                        continue  # a fault
                    judge.find(f"the log of {name} has: {line}\n  " + "\n  ".join(around))
        if site.server.process.returncode != 0:
            judge.find(f"the server ended with {site.server.process.returncode}")
        deadline = awake_s() + IDLE_WITHIN_S
        while left := processes_with(str(site.directory)):
            if awake_s() > deadline:
                judge.find(f"left over: {left}")
                break
            time.sleep(0.2)
        # It is not there if it was removed, and nothing new was stored since then.
        if site.store.is_dir() and cache_command(["verify", "--ssd-cache-dir", str(site.store)]):
            judge.find("the store has bad blocks")

    def lines(self) -> list[str]:
        judge = self.judge
        lines = [f"{self.seconds:g} s, seed {self.seed}: {judge.kinds.total()} requests"]
        lines += [f"{name:32} {count:6}" for name, count in sorted(judge.outcomes.items())]
        lines += self.saboteur.lines()
        lines.append(f"hostile requests: {dict(self.hostile.outcomes)}")
        lines.append(f"event loops were judged for {self.stalls.judged} s")
        for role, sizes in self.memory.items():
            first, second, last = (statistics.median(third) / 2**20 for third in thirds(sizes))
            lines.append(
                f"{role:22} {first:6.1f} {second:6.1f} {last:6.1f} MB, median of each third"
            )
        lines.append(
            f"longest pause in a stream {judge.longest_pause_s:.1f} s,"
            f" longest wait for a first byte {judge.longest_wait_s:.1f} s"
        )
        lines += [f"WRONG: {each}" for each in judge.findings]
        return [*lines, f"{len(judge.findings)} findings"]


def processes_with(text: str) -> list[str]:
    """Return the command lines of all processes that have ``text``."""
    return [line for line in ps("-A", "-ww", "-o", "args=").splitlines() if text in line]


def chaos(directory: Path, seconds: float, seed: int, pace: float, fault_pace: float) -> Chaos:
    """Run in ``directory``, and return the finished run."""
    kinds: dict[str, Kind] = {
        SHARED: "llama",
        "b": "qwen3_next",
        SELDOM: "gemma3",
        "ranks": "qwen3",
    }
    models = {name: make_tiny(kind, directory / f"model-{name}") for name, kind in kinds.items()}
    models["text"] = make_text_model("bert", directory / "model-text")
    if importlib.util.find_spec("mlx_vlm"):
        models["images"] = make_vision_model("pixtral", directory / "model-images")
    adapters = {
        name: make_adapter(models[SHARED], directory / f"adapter-{name}", number)
        for number, name in enumerate(("one", "two"))
    }
    run = Chaos(Site(directory, models, adapters), seconds, seed, pace, fault_pace)
    run.run()
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=1200, help="seconds of chaos (default: %(default)g)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of load and faults (default: %(default)s)"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=1,
        help="factor of the pauses of clients and between faults (default: %(default)g)",
    )
    parser.add_argument(
        "--fault-pace", type=float, help="factor of the pauses between faults (default: --pace)"
    )
    options = parser.parse_args(arguments)
    if not os.environ.get(IN_NAMESPACE):
        given = {name: value for name, value in vars(options).items() if value is not None}
        return run_in_namespace(
            [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        )
    # A short run tells little of memory: processes are forked, and none imports everything.
    os.environ[FORKS_VARIABLE] = str(int(options.seconds < LONG_S))
    with private_directory() as name:
        directory = Path(name)
        isolated = os.environ[IN_NAMESPACE] == "yes"
        has_small_disk = isolated and mount_small_disk(directory / "disk")
        if not has_small_disk:
            print_line("no full disk: this machine lets us mount none")
        try:
            pace, fault_pace = options.pace, options.fault_pace
            if fault_pace is None:
                fault_pace = pace
            run = chaos(directory, options.seconds, options.seed, pace, fault_pace)
        finally:
            if has_small_disk:
                unmount(directory / "disk")
    for line in run.lines():
        print_line(line)
    return int(bool(run.judge.findings))


def run_in_namespace(arguments: Sequence[str]) -> int:
    """Run this program where a small disk can be mounted, or else as it is."""
    isolated = ["unshare", "--map-root-user", "--mount"]
    allowed = (
        shutil.which("unshare")
        and not subprocess.run([*isolated, "true"], capture_output=True).returncode
    )
    command = [sys.executable, "-m", "tests.e2e.chaos", *arguments]
    environment = {**os.environ, IN_NAMESPACE: "yes" if allowed else "no"}
    return subprocess.run([*(isolated if allowed else []), *command], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
