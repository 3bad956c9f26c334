"""A whole server under mixed load: `python -m tests.e2e.soak --minutes 30`.

The load comes in rounds. In the pause after each round the server must return to idle: no
sequence, no queue entry, no held memory, no open file of a client that has gone. The processes
must stay the same and their memory flat, and a repeated prompt must get the same answer. The
engine checks its accounting after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.awake import awake_s
from tests.e2e.server import CHECKED, Server, ps, serving
from tests.e2e.soak.load import ANSWER_TOKENS, Load
from tests.e2e.soak.report import GROWTH_BYTES, MORE_FILES, Report, grows, open_files, print_line
from tests.forked.process import FORKS_VARIABLE

ROUND_S = 30.0
"""At most: a short run has three rounds, so that a last third can be compared with a second."""
SAMPLE_EVERY_S = 1.0
IDLE_WITHIN_S = 30.0
CLEAR_GAP = 5e-3
"""The least lead of the best token's logit, if the engine does not promise the same bits. Rounding
changes logits by about a thousandth of it."""
PARTS = ("router", "engine", "kvstore")

FLAGS = (
    *("--kv-bits", "16"),
    *("--max-batch-size", "8", "--completion-batch-size", "16", "--max-queue-size", "16"),
    *("--num-blocks", "512", "--ssd-policy", "write_through"),
)
IDLE_METRICS = (
    "active_sequences",
    "queued_requests",
    "mlx_lm_server_engine_waiting_sequences",
    "mlx_lm_server_kv_unevictable_bytes",
)


def clear_prompts(model: Path, seed: int, count: int, least_gap: float) -> list[list[int]]:
    """Return ``count`` prompts in whose greedy answers the best token leads by more than
    ``least_gap`` at every position.

    Some prompts are short, some long, and some share a prefix.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from tests.oracle import oracle

    language_model = oracle(model).model
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    chance = random.Random(seed)
    head = [chance.randrange(3, vocab_size) for _ in range(300)]
    found: list[list[int]] = []
    for attempt in range(500):
        tail = [chance.randrange(3, vocab_size) for _ in range(chance.choice((3, 15, 16, 17, 90)))]
        prompt = head * (attempt % 2) + tail
        cache = make_prompt_cache(language_model)
        tokens, gap = prompt, float("inf")
        for _ in range(ANSWER_TOKENS):
            logits = language_model(mx.array([tokens]), cache=cache)[0, -1]
            best = mx.sort(logits)[-2:]
            gap = min(gap, (best[1] - best[0]).item())
            tokens = [int(mx.argmax(logits).item())]
        if gap > least_gap:
            found.append(prompt)
        if len(found) == count:
            break
    return found


class Watch:
    """Observes the processes of a server from outside."""

    def __init__(self, server: Server, report: Report) -> None:
        self._server = server
        self._report = report
        self.names = {
            pid: name for name in PARTS for pid in server.pids(f"services.processes.{name}")
        }
        self.names[server.process.pid] = "supervisor"

    async def sample(self) -> None:
        """Record the resident memory of each process, until cancelled."""
        while True:
            pids = ",".join(map(str, self.names))
            for line in ps("-o", "pid=,rss=", "-p", pids).splitlines():
                pid, kilobytes = map(int, line.split())
                self._report.memory[self.names[pid]].append(kilobytes * 1024)
            await asyncio.sleep(SAMPLE_EVERY_S)

    def measure_idle(self) -> None:
        """Record the memory in use by MLX, and open files."""
        active = self._server.metric("mlx_lm_server_active_memory_bytes")
        self._report.memory["engine, MLX idle"].append(int(active))
        for pid, name in self.names.items():
            if count := open_files(pid):
                self._report.files[name].append(count)

    def check_processes(self) -> None:
        now = {*self._server.pids("services."), self._server.process.pid}
        if now != set(self.names):
            self._report.add_finding(f"the processes were {self.names}, now they are {now}")


async def wait_idle(server: Server, add_finding: Callable[[str], None]) -> None:
    """Wait until no request, queue entry or held memory is left."""
    deadline = awake_s() + IDLE_WITHIN_S
    while left := await asyncio.to_thread(leftovers, server):
        if awake_s() > deadline:
            add_finding(f"left {IDLE_WITHIN_S:g} s after the load: {left}")
            return
        await asyncio.sleep(0.2)


def leftovers(server: Server) -> dict[str, float]:
    """Return what an idle server should not have: requests, queue entries, held memory."""
    left = {name: server.metric(name) for name in IDLE_METRICS}
    left["requests"] = server.client.get("/health").json()["requests"]
    left["in engines"] = server.sequences_in_flight()
    return {name: value for name, value in left.items() if value}


def soak(
    model: Path,
    minutes: float,
    *,
    ssd_gb: float = 0.02,
    clients: int = 6,
    seed: int = 0,
    num_prompts: int = 12,
    slack_bytes: int = GROWTH_BYTES,
) -> Report:
    """Run the load on a new server, which must still serve at the end and stop cleanly.

    ``num_prompts`` is the number of prompts that are repeated.
    """
    report = Report(minutes * 60)
    flags = (*FLAGS, "--ssd-max-size-gb", str(ssd_gb))
    with serving(model, *flags, **CHECKED) as server:
        exact = not any("may depend on the batch" in line for line in server.log)
        prompts = clear_prompts(model, seed, num_prompts, 0 if exact else CLEAR_GAP)
        load = Load(str(server.client.base_url), prompts, report, seed, exact=exact)
        asyncio.run(_rounds(server, load, report, clients))
        server.complete("still serving?", 4)
    if server.process.returncode != 0:
        report.add_finding(f"the server ended with code {server.process.returncode}")
    for line in server.log:
        if re.search(r"Traceback|^\S+ (error|critical) ", line):
            report.add_finding(f"the log has: {line}")
    for name, sizes in report.memory.items():
        if grows(sizes, slack_bytes):
            report.add_finding(f"the memory of {name} grows")
    for name, counts in report.files.items():
        if counts[-1] > counts[0] + MORE_FILES:
            report.add_finding(f"{name} leaves files open, by pause: {counts}")
    return report


async def _rounds(server: Server, load: Load, report: Report, clients: int) -> None:
    watch = Watch(server, report)
    await wait_idle(server, report.add_finding)
    sampling = asyncio.create_task(watch.sample())
    began, printed = time.monotonic(), 0
    end = began + report.seconds
    round_s = min(ROUND_S, report.seconds / 3)
    while (now := time.monotonic()) < end:
        await load.run(clients, min(now + round_s, end))
        await wait_idle(server, report.add_finding)
        watch.measure_idle()
        watch.check_processes()
        new, printed = server.log[printed:], len(server.log)
        for line in new:
            if re.match(r"\S+ (warning|error|critical) |Traceback", line):
                print_line(line)
        minutes, answers = (time.monotonic() - began) / 60, report.counts["answers"]
        print_line(f"{minutes:5.1f} min, {answers} answers, {len(report.findings)} findings")
    await load.close()
    sampling.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=30, help="minutes of load (default: %(default)g)"
    )
    parser.add_argument("--model", help="demo, or a directory (default: a tiny random model)")
    parser.add_argument(
        "--clients", type=int, default=6, help="concurrent clients (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the load (default: %(default)s)"
    )
    options = parser.parse_args()
    from engine.backend.blas import load_fast_blas

    load_fast_blas()  # before anything imports mlx
    os.environ[FORKS_VARIABLE] = "0"  # memory is measured
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        if options.model is None:
            from tests.tiny_models import make_tiny

            model, ssd_gb = make_tiny("llama", Path(directory) / "tiny"), 0.02
        else:
            from engine.model.load import resolve

            model, ssd_gb = resolve(options.model), 0.5
        report = soak(
            model, options.minutes, ssd_gb=ssd_gb, clients=options.clients, seed=options.seed
        )
    for line in report.lines():
        print_line(line)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
