"""The demo model's codes here and in llama.cpp's server, given as ``LLAMA_SERVER``.

The sources are in the sdist of the package llama-cpp-python (``vendor/llama.cpp``):

    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF
    make -C build llama-server
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench import prompts
from bench.client import checked, complete_all, token_rate
from bench.servers import llama_server, ours
from bench.turns import in_turn, median_ratio
from engine.backend.threads import num_threads
from engine.model.demo import demo_gguf

VARIABLE = "LLAMA_SERVER"
STREAMS = (1, 4, 8, 16)
PREFILL_TOKENS, PROMPT_TOKENS, TOKENS = 512, 128, 32
FLAGS = ("--max-batch-size", "16", "--completion-batch-size", "32", "--cpu-precision")
NAMES = ("fast", "exact", "llama.cpp")

Measure = Callable[[int, int], float]
"""Tokens per second of the server at a port, with the prompts of a run."""


def llama_cpp(model: str, runs: int) -> None:
    """Compare tokens per second of prompts, and of answers to 1 to 16 streams, in turn.

    The model is the demo, in the codes that it ships with."""
    program = os.environ.get(VARIABLE)
    if not program:
        sys.exit(f"set {VARIABLE} to llama.cpp's program llama-server")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        gguf, most = demo_gguf(Path(scratch)), max(STREAMS)
        ports = [stack.enter_context(ours("demo-4bit", *FLAGS, name)) for name in NAMES[:2]]
        ports.append(stack.enter_context(llama_server(program, gguf, most, num_threads())))
        for port in ports:
            _answers(port, 1, 2)
        print(f"tokens per second    {'  '.join(f'{name:>9}' for name in NAMES)}   ratios")
        _compare(f"prompt of {PREFILL_TOKENS}", ports, runs, _prefill)
        for streams in STREAMS:
            _compare(f"{streams} streams", ports, runs, _decode(streams))


def _compare(what: str, ports: list[int], runs: int, measure: Measure) -> None:
    """Print medians, and medians of ratios to llama.cpp; over 1 means that this server is
    faster."""
    rates = in_turn([partial(measure, port) for port in ports], runs)
    ratios = [median_ratio(each, rates[-1]) for each in rates[:2]]
    shown = "  ".join(f"{statistics.median(each):9.1f}" for each in rates)
    print(f"{what:19}  {shown}   {ratios[0]:.2f}  {ratios[1]:.2f}", flush=True)


def _prefill(port: int, run: int) -> float:
    text = prompts.text(1000 * (run + 1), PREFILL_TOKENS)
    (answer,) = checked(asyncio.run(complete_all(port, [text], 1)))
    return PREFILL_TOKENS / answer.first_s


def _decode(streams: int) -> Measure:
    return lambda port, run: _answers(port, 1000 * (run + 1) + streams, streams)


def _answers(port: int, seed: int, streams: int) -> float:
    """Return the tokens per second of answers to ``streams`` new prompts at once."""
    texts = [prompts.text(100 * seed + i, PROMPT_TOKENS) for i in range(streams)]
    return token_rate(asyncio.run(complete_all(port, texts, TOKENS)))
