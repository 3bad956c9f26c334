"""Ranks are killed and stopped, one after the other, while an engine of several ranks answers.

``python -m tests.e2e.ranks.rank_faults --rounds 50`` makes a tiny model and counts. A round ends a
rank at a random point, and waits until each request has its text or an error, and the group serves.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.server import Server, is_running, serving, text_of
from tests.tiny_models import make_tiny

STREAMS, TOKENS = 3, 100
MAX_S = 20.0
PATIENCE_S = 120.0


class RankFaults:
    """A server under load whose ranks are lost. ``findings`` are what must not be."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server, self._random = server, random.Random(seed)
        self._pool = ThreadPoolExecutor(STREAMS)
        self._expected = [self._answer(number) for number in range(STREAMS)]
        self.findings: list[str] = []
        self.times_s: list[float] = []

    def round(self, rank: int, number: int) -> None:
        """End ``rank`` with the signal ``number`` while all streams run."""
        pids, known, logged = self.pids(), len(self.findings), len(self._server.log)
        answers = [self._pool.submit(self._answer, each) for each in range(STREAMS)]
        time.sleep(self._random.uniform(0.0, 0.8))
        started = time.monotonic()
        os.kill(pids[rank], number)
        name = f"{signal.Signals(number).name} of rank {rank}"
        for each, answer in enumerate(answers):
            self._judge(name, each, answer)
        self.pids()
        took_s = time.monotonic() - started
        again = self._answer(0)
        self.times_s.append(took_s)
        if again != self._expected[0]:
            self.findings.append(f"{name}: another text after it")
        if took_s > MAX_S:
            self.findings.append(f"{name}: back after {took_s:.1f} s")
        if left := [pid for pid in pids if is_running(pid)]:
            self.findings.append(f"{name}: {left} left over")
        found = self.findings[known:]
        sys.stdout.write(
            f"{name}: {took_s:.1f} s{''.join(f', FINDING {each}' for each in found)}\n"
        )
        if found:
            sys.stdout.write("".join(f"    {line}\n" for line in self._server.log[logged:]))
        sys.stdout.flush()

    def pids(self) -> list[int]:
        """Return the process of each rank, once all are there."""
        found: list[int] = []

        def there() -> bool:
            names = ("services.processes.engine", "services.processes.rank ")
            leaders, others = map(self._server.pids, names)
            found[:] = [*leaders, *others]
            return len(leaders) == len(others) == 1

        self._server.wait_until(there, PATIENCE_S, "all ranks")
        return found

    def _judge(self, name: str, number: int, answer: Future[str]) -> None:
        try:
            text = answer.result(PATIENCE_S)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 503:
                self.findings.append(f"{name}: {error}")
        except Exception as error:
            self.findings.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if text != self._expected[number]:
                self.findings.append(f"{name}: another text")

    def _answer(self, number: int) -> str:
        fields = {"temperature": 1.0, "seed": number}
        return text_of(list(self._server.stream("abc", TOKENS, **fields)))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.ranks.rank_faults", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    kinds = [(rank, number) for number in (signal.SIGKILL, signal.SIGSTOP) for rank in (1, 0)]
    flags = ("--distributed-mode", "ring", "--num-local-ranks", "2", "--no-ssd")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder, "model"))
        with serving(model, *flags) as server:
            faults = RankFaults(server, options.seed)
            for number in range(options.rounds):
                faults.round(*kinds[number % len(kinds)])
    longest_s = max(faults.times_s)
    sys.stdout.write(
        f"{options.rounds} rounds, {len(faults.findings)} findings; back after {longest_s:.1f} s "
        "at most\n"
    )
    return 1 if faults.findings else 0


if __name__ == "__main__":
    sys.exit(main())
