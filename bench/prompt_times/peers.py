"""Prompts here and in other servers: llama.cpp's, and mlx-lm's under load."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.peers.llama_cpp import VARIABLE
from bench.prompt_times.measuring import FLAGS, Options, first_s, ms
from bench.servers import llama_server, mlx_lm_server, ours
from engine.backend.threads import num_threads
from engine.model.demo import demo_gguf
from engine.model.load import resolve
from services.commands.bench.report import LoadReport, read_report
from shared.paths import python_path

PRECISIONS, LLAMA = ("fast", "exact"), "llama.cpp"
LENGTHS, CHECK_LENGTHS, CONTEXT_TOKENS = (512, 2000, 7500), (512,), 8192
CLIENTS, REQUESTS = (4, 8, 16), 2
"""Number of requests per client."""
MODELS = {"mlx_lm.server": "default_model"}
"""Model names for servers that do not list their model, or list others too."""
BATCH = ("--max-batch-size", "16", "--completion-batch-size", "32")
LOAD = ("--workload=mixed", "--input-tokens=16:1024", "--output-tokens=16:64", "--timeout-s=300")


def llama(options: Options) -> None:
    """Print times to first tokens beside llama.cpp's server, which has the same codes."""
    program = os.environ.get(VARIABLE)
    if not program:
        print(f"left out: set {VARIABLE} to llama.cpp's program llama-server")
        return
    threads = num_threads()
    print(f"--model demo-4bit {' '.join(FLAGS)} --kv-bits 16 --cpu-precision; {threads} threads")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        ports = {
            name: options.start(stack, ours("demo-4bit", *FLAGS, "--cpu-precision", name))
            for name in PRECISIONS
        }
        gguf = demo_gguf(Path(scratch))
        ports[LLAMA] = options.start(stack, llama_server(program, gguf, 1, threads, CONTEXT_TOKENS))
        print(f"tokens  {''.join(f'{name:>11}' for name in ports)}   times of it: fast, exact")
        for tokens in options.lengths or (CHECK_LENGTHS if options.check else LENGTHS):
            found = options.in_turn(
                {name: partial(_first, port=port, tokens=tokens) for name, port in ports.items()}
            )
            shown = "".join(f"{ms(statistics.median(times)):>11}" for times in found.values())
            ratios = [
                statistics.median(a / b for a, b in zip(found[name], found[LLAMA], strict=True))
                for name in PRECISIONS
            ]
            print(f"{tokens:6d}  {shown}   {ratios[0]:.2f}  {ratios[1]:.2f}", flush=True)


def _first(run: int, port: int, tokens: int) -> float:
    return first_s(port, 10_000 * run + tokens, tokens)


def percentiles(options: Options) -> None:
    """Print times between texts, and tokens per second, of a mixed load beside mlx-lm's server."""
    print(
        f"--model demo-fp32 {' '.join((*FLAGS, *BATCH))} --kv-bits 16; bench serve {' '.join(LOAD)}"
    )
    print(
        "clients            between texts: median, 99 %       first token: 99 %       tok/s"
        "       ratios: 99 %, first, tok/s"
    )
    with ExitStack() as stack:
        ports = {
            "ours": options.start(stack, ours("demo-fp32", *FLAGS, *BATCH)),
            "mlx_lm.server": options.start(stack, mlx_lm_server(resolve("demo-fp32"))),
        }
        for clients in CLIENTS[:1] if options.check else CLIENTS:
            found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ports}
            for run in range(options.runs):
                for name in ports if run % 2 == 0 else reversed(list(ports)):
                    with options.locked():
                        found[name].append(_figures(_load(name, ports[name], clients, run)))
            middle = {
                name: [statistics.median(each) for each in zip(*rows, strict=True)]
                for name, rows in found.items()
            }
            for name, (median, most, first, rate) in middle.items():
                print(
                    f"{clients:7d} {name:>14}  {median:10.0f} ms, {most:6.0f} ms   "
                    f"{first:16.0f} ms   {rate:9.1f}"
                )
            ratios = [
                statistics.median(a[place] / b[place] for a, b in zip(*found.values(), strict=True))
                for place in (1, 2, 3)
            ]
            print(f"{'':60}{'  '.join(f'{ratio:.2f}' for ratio in ratios)}", flush=True)


def _load(name: str, port: int, clients: int, run: int) -> LoadReport:
    """Put a load of ``clients`` clients on a server, from a separate process."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        file = Path(scratch) / "report.json"
        command = [sys.executable, "-m", "mlx_lm_server", "bench", "serve", *LOAD]
        command += [f"--url=http://127.0.0.1:{port}", f"--concurrency={clients}"]
        command += [f"--model={MODELS[name]}"] if name in MODELS else []
        command += [f"--requests={REQUESTS * clients}", f"--seed={1000 * run + clients}"]
        subprocess.run(
            [*command, f"--save={file}"],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return read_report(file)


def _figures(report: LoadReport) -> tuple[float, float, float, float]:
    """Return median and 99th percentile of the times between texts and of first tokens, all in
    ms, and tokens per second."""
    (level,) = report.levels
    if level.failed or level.itl_ms is None or level.ttft_ms is None:
        sys.exit(f"requests failed: {level.errors}")
    return level.itl_ms.p50, level.itl_ms.p99, level.ttft_ms.p99, level.output_throughput
