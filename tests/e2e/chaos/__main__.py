"""Processes that die and stop, sockets that are cut, disks that are lost, all under load:
`python -m tests.e2e.chaos --seconds 1200 --seed 1`.

Two models on three engines, one of them from elsewhere, serve the clients of three keys. Every
answer must be the one that the undisturbed server gave, or a documented error. Nothing may hang,
nothing be answered twice, and nothing be left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from services.commands.cache import main as cache_command
from tests.e2e.chaos.faults import RECOVERED_WITHIN_S, Saboteur
from tests.e2e.chaos.load import Clients, Judge, learn
from tests.e2e.chaos.questions import Question, Reply, make_questions
from tests.e2e.chaos.site import KEYS, Site, mount_small_disk, unmount
from tests.e2e.server import private_directory
from tests.e2e.soak.__main__ import IDLE_WITHIN_S, leftovers
from tests.e2e.soak.report import print_line
from tests.tiny_models import Kind, make_tiny

CLIENTS_A_KEY = 2
IN_NAMESPACE = "_CHAOS_IN_NAMESPACE"
GROWTH_BYTES, MORE_FILES = 64 * 2**20, 16
"""What a process may take more of at the end than at the begin."""
ROLES = ("router", "kvstore", "engine a", "engine b", "engine elsewhere")


class Chaos:
    """One run on ``site``."""

    def __init__(self, site: Site, seconds: float, seed: int) -> None:
        self.site, self.seconds, self.seed = site, seconds, seed
        self.judge = Judge()
        self.saboteur = Saboteur(site, seed)
        self.answers: list[tuple[Question, Reply]] = []

    def run(self) -> None:
        with self.site.running():
            asyncio.run(self._run())
        self._check_after_the_end()

    async def _run(self) -> None:
        site, judge = self.site, self.judge
        for link in site.links:
            await link.start()
        site.join()
        try:
            assert await site.wait_whole(120) is not None, site.server.log[-30:]
            questions = make_questions(tuple(site.models), self.seed)
            self.answers = await asyncio.to_thread(learn, site.url, f"sk-{KEYS[0]}", questions)
            print_line(f"{len(self.answers)} of {len(questions)} questions have clear answers")
            await self._ask_all()
            before = self._sizes()
            await self._disturb()
            if await site.wait_whole(RECOVERED_WITHIN_S) is None:
                judge.find(f"not whole again: {site.server.client.get('/health').text}")
            wrong = judge.outcomes.total() - judge.outcomes["right"]
            await self._ask_all()
            if judge.outcomes.total() - judge.outcomes["right"] != wrong:
                judge.find(f"not all is answered once it is over: {judge.outcomes}")
            await self._check_idle()
            extra = len(site.server.pids("-m services.")) - 4
            if extra:
                judge.find(f"{extra} processes more than four below the supervisor")
            self._check_sizes(before, self._sizes())
        finally:
            if code := await asyncio.to_thread(site.leave):
                judge.find(f"the engines from elsewhere ended with {code}")
            for link in site.links:
                link.close()

    async def _disturb(self) -> None:
        clients = [Clients(self.site, key, self.judge, self.answers, self.seed) for key in KEYS]
        async with asyncio.TaskGroup() as group:
            for each in clients:
                group.create_task(each.run(CLIENTS_A_KEY))
            await self.saboteur.run(time.monotonic() + self.seconds)
            for each in clients:
                each.is_over = True
        for each in clients:
            await each.close()

    async def _ask_all(self) -> None:
        """Ask every question once, several at a time."""
        asking = Clients(self.site, KEYS[1], self.judge, self.answers, self.seed)
        places = asyncio.Semaphore(6)

        async def ask(question: Question, expected: Reply) -> None:
            async with places:
                await asking.ask(question, expected, None)

        await asyncio.gather(*(ask(*each) for each in self.answers))
        await asking.close()

    # -- what is left ----------------------------------------------------------------------

    async def _check_idle(self) -> None:
        deadline = time.monotonic() + IDLE_WITHIN_S
        while left := await asyncio.to_thread(leftovers, self.site.server):
            if time.monotonic() > deadline:
                self.judge.find(f"left {IDLE_WITHIN_S:g} s after the load: {left}")
                return
            await asyncio.sleep(0.2)

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return the resident bytes and the open files of each process, by what it does."""
        processes = {role: self.site.pids(role) for role in ROLES}
        processes["supervisor"] = [self.site.server.process.pid]
        processes["supervisor elsewhere"] = [self.site.joined.popen.pid]
        found = {}
        for role, pids in processes.items():
            if len(pids) != 1:
                self.judge.find(f"processes that are {role}: {pids}")
                continue
            listing = subprocess.run(
                ["ps", "-o", "rss=", "-p", str(pids[0])], capture_output=True, text=True, check=True
            ).stdout
            files = Path(f"/proc/{pids[0]}/fd")  # not on macOS
            found[role] = int(listing) * 1024, len(list(files.iterdir())) if files.is_dir() else 0
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
            if later_size > size + GROWTH_BYTES or later_files > files + MORE_FILES:
                self.judge.find(f"{role} has grown")

    def _check_after_the_end(self) -> None:
        site, judge = self.site, self.judge
        for name, log in (("server", site.server.log), ("elsewhere", site.joined.log)):
            for number, line in enumerate(log):
                if re.search(r"Traceback|internal error|^\S+ critical ", line):
                    around = log[max(0, number - 5) : number + 40]
                    judge.find(f"the log of {name} has: {line}\n  " + "\n  ".join(around))
        if site.server.process.returncode != 0:
            judge.find(f"the server ended with {site.server.process.returncode}")
        deadline = time.monotonic() + IDLE_WITHIN_S
        while left := processes_with(str(site.directory)):
            if time.monotonic() > deadline:
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
        lines.append(
            f"longest pause in a stream {judge.longest_pause_s:.1f} s,"
            f" longest wait for an answer's begin {judge.longest_wait_s:.1f} s"
        )
        lines += [f"WRONG: {each}" for each in judge.findings]
        return [*lines, f"{len(judge.findings)} findings"]


def processes_with(text: str) -> list[str]:
    """Return the command lines of all processes that have ``text``."""
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True
    ).stdout
    return [line for line in listing.splitlines() if text in line]


def chaos(directory: Path, seconds: float, seed: int, *, has_small_disk: bool) -> Chaos:
    """Run in ``directory``, and return what came of it."""
    kinds: dict[str, Kind] = {"a": "llama", "b": "qwen3_next"}
    models = {name: make_tiny(kind, directory / f"model-{name}") for name, kind in kinds.items()}
    run = Chaos(Site(directory, models, has_small_disk=has_small_disk), seconds, seed)
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
    options = parser.parse_args(arguments)
    if not os.environ.get(IN_NAMESPACE):
        return run_in_namespace(["--seconds", str(options.seconds), "--seed", str(options.seed)])
    with private_directory() as name:
        directory = Path(name)
        isolated = os.environ[IN_NAMESPACE] == "yes"
        has_small_disk = isolated and mount_small_disk(directory / "disk")
        if not has_small_disk:
            print_line("no full disk: this machine lets us mount none")
        run = chaos(directory, options.seconds, options.seed, has_small_disk=has_small_disk)
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
