"""Sequences that share an engine: their first steps after cached prefixes, and how many fit.

There is no baseline in the program. To compare two commits, run it in a checkout of each, in
turn."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from bench import prompts
from bench.in_process import InProcessEngine
from bench.serving.models import make_short_demo
from engine.model.demo import demo_model_path

JOINING = ((1, 1000), (4, 200), (8, 200), (16, 200), (4, 1000), (8, 1000), (16, 1000))
"""Rows, and the tokens of each prompt."""
MARKS = (1, 12, 50)
"""Steps in which all rows decode: times are given from the requests to the ends of these."""
AGENTS, AGENT_TOKENS, ANSWER_TOKENS, MEMORY_TOKENS = 12, 4000, 400, 20_000
LAYERS = 8
"""Of the demo model: its 30 layers need an hour for the prompts of all agents."""


def joined(model: str, runs: int) -> None:
    """Print the milliseconds from requests with cached prefixes to some of their steps."""
    driver = InProcessEngine(model, kv_bits=8)
    scheduler = driver.replica.scheduler
    for rows, tokens in JOINING:
        given = [prompts.ids(1000 * rows + tokens + number, tokens) for number in range(rows)]
        driver.texts(given, 2)
        times: dict[int, list[float]] = {mark: [] for mark in MARKS}
        for _ in range(runs):
            begun, steps = time.perf_counter(), 0
            requests = [driver.submit(prompt, 300) for prompt in given]
            while steps < max(MARKS):
                driver.step()
                if len(scheduler.live()) == rows and all(one.generated for one in scheduler.live()):
                    steps += 1
                    if steps in times:
                        times[steps].append(1e3 * (time.perf_counter() - begun))
            for request in requests:
                scheduler.abort(request)
            while not scheduler.idle:
                driver.step()
        shown = ", ".join(f"{statistics.median(of):.0f} to step {n}" for n, of in times.items())
        print(f"{rows} x {tokens}, ms: {shown}", flush=True)


def crowded(model: str, runs: int) -> None:
    """Print the tokens per second of agents whose prompts do not fit into memory together."""
    with tempfile.TemporaryDirectory(prefix="bench-") as private:
        path = Path(model)
        if model.startswith("demo"):
            path = make_short_demo(demo_model_path(), Path(private) / "model", LAYERS)
        driver = InProcessEngine(str(path), kv_bits=8, num_blocks=MEMORY_TOKENS // 16)
        for run in range(runs):
            given = [prompts.ids(run * AGENTS + n, AGENT_TOKENS) for n in range(AGENTS)]
            begun, begun_cpu = time.perf_counter(), time.process_time()
            driver.texts(given, ANSWER_TOKENS)
            took, took_cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
            tokens = AGENTS * ANSWER_TOKENS
            print(
                f"{AGENTS} of {AGENT_TOKENS:,} tokens in {MEMORY_TOKENS:,}: "
                f"{tokens / took:.1f} tokens a second, {tokens / took_cpu:.1f} of CPU time",
                flush=True,
            )
