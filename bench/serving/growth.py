"""Where CPU time goes in a whole server under load, and how it grows.

Only one layer of the demo model is computed, so that most of the time is spent outside the
model. Each process's CPU time is divided by the tokens generated meanwhile."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import prompts
from bench.router.alone import cpu_s_of
from bench.servers import running
from bench.serving.models import make_short_demo
from engine.model.demo import demo_model_path
from services.measuring.client import ApiClient

PARTS = ("router", "engine", "kvstore", "local")
"""Modules of services/ that processes run; `local` is the supervisor."""
PHASES = ("schedule", "build", "sample", "emit")
"""Phases of a step in an engine's host."""
COUNTERS = (
    *("key_generated_tokens_total", "steps_total", "batch_rows_total", "step_seconds_total"),
    *(f"{phase}_seconds_total" for phase in PHASES),
)
COMMAND = (sys.executable, "-m", "mlx_lm_server", "--host=127.0.0.1", "--log-level=warning")
SETTLE_S, SECONDS = 1.0, 4.0
OUTPUT_TOKENS = 4000
TEXT = "[[model]]\nid = {id!r}\npath = {path!r}\n"


class LoadCase(NamedTuple):
    """One kind of load."""

    streams: int
    context: int = 64
    engines: int = 1
    models: int = 1


CASES = (
    *(LoadCase(streams) for streams in (1, 4, 16, 32)),
    *(LoadCase(16, context) for context in (512, 2048)),
    *(LoadCase(16, engines=engines) for engines in (2,)),
    *(LoadCase(16, models=models) for models in (2,)),
)


def growth(model: str, runs: int) -> None:
    """Print host time by batch, context, engines and models."""
    print("microseconds: of CPU a token, by process; and of a step (rows: of its batch), by phase")
    names = [f"{name:>9}" for name in (*PARTS, "rows", "all", *PHASES)]
    print(f"streams  context  engines  models    tok/s {''.join(names)}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        path = make_short_demo(demo_model_path(quantized=True), Path(name) / "model", 1)
        for case in CASES:
            with _serving(path, Path(name), case) as (port, pid):
                found = [asyncio.run(_measured(port, pid, case)) for _ in range(runs)]
            middle = {each: statistics.median(one[each] for one in found) for each in found[0]}
            shown = [f"{1e6 * middle[part]:9.0f}" for part in PARTS]
            shown += [f"{middle['rows']:9.1f}", f"{1e6 * middle['step']:9.0f}"]
            shown += [f"{1e6 * middle[phase]:9.0f}" for phase in PHASES]
            print(
                f"{case.streams:7d}  {case.context:7d}  {case.engines:7d}  {case.models:6d}  "
                f"{middle['rate']:7.0f} {''.join(shown)}",
                flush=True,
            )


@contextmanager
def _serving(path: Path, folder: Path, case: LoadCase) -> Iterator[tuple[int, int]]:
    flags = ["--max-batch-size=32", "--completion-batch-size=32", "--no-ssd"]
    flags += ["--kv-bits=16", "--max-generation-tokens=8000", f"--engines={case.engines}"]
    if case.models == 1:
        flags += [f"--model={path}"]
    else:
        config = folder / "models.toml"
        names = (f"model-{number}" for number in range(case.models))
        config.write_text("".join(TEXT.format(id=each, path=str(path)) for each in names))
        flags += [f"--config={config}", "--memory-gb=8"]
    with running([*COMMAND, *flags], "/readyz") as server:
        yield server


async def _measured(port: int, pid: int, case: LoadCase) -> dict[str, float]:
    """Return the tokens per second, and each part's CPU seconds per token."""
    with closing(ApiClient(f"http://127.0.0.1:{port}")) as client:
        models = await client.models()
        bodies = [
            {
                "model": models[number % len(models)],
                "prompt": prompts.text(time.monotonic_ns(), case.context),
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            for number in range(case.streams)
        ]
        begun = [asyncio.Event() for _ in bodies]
        tasks = [
            asyncio.create_task(client.stream("/completions", body, on_first=event.set))
            for body, event in zip(bodies, begun, strict=True)
        ]
        for event in begun:
            await event.wait()
        await asyncio.sleep(SETTLE_S)
        counted, cpu_s, at = counters_of(port), _cpu_s(pid), time.perf_counter()
        await asyncio.sleep(SECONDS)
        seconds = time.perf_counter() - at
        spent_s = {part: after - cpu_s[part] for part, after in _cpu_s(pid).items()}
        done = {name: after - counted[name] for name, after in counters_of(port).items()}
        for task in tasks:
            if task.done():
                raise RuntimeError(f"a stream ended: {task.result()}")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tokens, steps = done["key_generated_tokens_total"], done["steps_total"]
    return {
        "rate": tokens / seconds,
        **{part: spent_s[part] / tokens for part in PARTS},
        "rows": done["batch_rows_total"] / steps,
        "step": done["step_seconds_total"] / steps,
        **{phase: done[f"{phase}_seconds_total"] / steps for phase in PHASES},
    }


def _cpu_s(pid: int) -> dict[str, float]:
    """Return the CPU seconds of each part of the server ``pid``."""
    return {part: sum(map(cpu_s_of, pids)) for part, pids in processes_of(pid).items()}


def processes_of(pid: int) -> dict[str, list[int]]:
    """Return the process ids of each part of the server ``pid``."""
    found: dict[str, list[int]] = {part: [] for part in PARTS}
    listing = ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="]
    lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    for line in lines.splitlines():
        number, parent, *command = line.split()
        for part in PARTS:
            if int(parent) == pid and f"services.processes.{part}" in command:
                found[part].append(int(number))
    found["local"].append(pid)
    return found


def counters_of(port: int, names: Sequence[str] = COUNTERS) -> dict[str, float]:
    """Return some counters, each summed over its labels; 0 for a counter that does not exist."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = dict.fromkeys(names, 0.0)
    for line in lines:
        name = line.partition("{")[0].removeprefix("mlx_lm_server_")
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found
