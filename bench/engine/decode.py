"""Decode steps on a CPU in every precision, beside reading the weights, and beside llama.cpp."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.peers.llama_cpp import VARIABLE
from bench.side import side
from engine.backend.threads import num_threads
from engine.model.demo import demo_gguf

SIDES = (
    ("demo-fp32", "exact"),
    *(("demo-4bit", precision) for precision in ("exact", "compact", "fast")),
)
PAIR = 2
"""Rows computed for a single row of codes, so that it has the same bits as among others."""
ROWS = (1, 4, 8, 16)
CONTEXT_TOKENS, STEPS, CHUNK_TOKENS = 200, 8, 256
PROGRAM = "llama-batched-bench"


def decode(model: str, runs: int) -> None:
    """Print the shortest and the median step, measured in turn: other programs only add time.

    Below are the times of everything in a step except attention. The model is always the demo,
    the only one available in all precisions."""
    with ExitStack() as stack:
        sides = [stack.enter_context(side("ours", *each)) for each in SIDES]
        names = ["fp32", *(f"4 bits, {precision}" for _, precision in SIDES[1:]), "reading fp32"]
        print(f"{'rows':>8}  " + "  ".join(f"{name:>15}" for name in names), flush=True)
        for rows in ROWS:
            times: list[list[float]] = [[] for _ in names]
            products: list[list[float]] = [[] for _ in sides]
            paired: list[list[float]] = [[] for _ in sides]
            for _ in range(2 * runs):
                for each, alone, one in zip(times, products, sides, strict=False):
                    each.append(one.call("decode", [CONTEXT_TOKENS] * rows, STEPS))
                    alone += [one.call("products", rows) for _ in range(STEPS)]
                if rows < PAIR:
                    for alone, one in zip(paired, sides, strict=True):
                        alone += [one.call("products", PAIR) for _ in range(STEPS)]
                times[-1].append(sides[0].call("read"))
            _print(f"{rows}", times)
            _print("products", products)
            if rows < PAIR:
                _print("padded", paired)
            step, reading = min(times[0]), min(times[-1])
            print(
                f"{'':8}  fp32 {step / reading:.2f} times reading, "
                f"its products alone {min(products[0]) / reading:.2f}; "
                + ", ".join(
                    f"{precision} {min(each) / step:.2f}"
                    for (_, precision), each in zip(SIDES[1:], times[1:], strict=False)
                )
                + " times fp32",
                flush=True,
            )
        chunks = [
            [one.call("prefill", 0, CHUNK_TOKENS) for _ in range(max(2, runs))] for one in sides
        ]
        _print("prompt", chunks)
    server = os.environ.get(VARIABLE)
    if server and (program := Path(server).with_name(PROGRAM)).exists():
        _llama(program, runs)


def _llama(program: Path, runs: int) -> None:
    """Print the steps of llama.cpp's own benchmark (means), with the demo's own codes."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(program), "-m", str(demo_gguf(Path(scratch))), "-c", "8192"]
        command += ["-npp", str(CONTEXT_TOKENS), "-ntg", str(3 * STEPS)]
        command += ["-npl", ",".join(map(str, ROWS)), "--output-format", "jsonl"]
        command += [part for flag in ("-t", "-tb") for part in (flag, str(num_threads()))]
        times: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for _ in range(max(1, runs // 2)):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for line in filter(lambda line: line.startswith("{"), done.stdout.splitlines()):
                found = json.loads(line)
                times[found["pl"]].append(found["t_tg"] / found["tg"])
    for rows, each in times.items():
        _print(f"llama {rows}", [each])


def _print(what: str, times: list[list[float]]) -> None:
    shown = (f"{1e3 * min(each):6.1f} / {1e3 * statistics.median(each):6.1f}" for each in times)
    print(f"{what:>8}  " + "  ".join(f"{each:>15}" for each in shown), flush=True)
