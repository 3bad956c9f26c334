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
from pathlib import Path

from bench import prompts
from bench.client import complete_all
from bench.servers import llama_server, ours
from engine.backend.threads import num_threads
from engine.model.demo import demo_gguf
from services.measuring.answers import StreamedAnswer

VARIABLE = "LLAMA_SERVER"
STREAMS = (1, 4, 8, 16)
PREFILL_TOKENS, PROMPT_TOKENS, TOKENS = 512, 128, 32
FLAGS = ("--max-batch-size", "16", "--completion-batch-size", "32", "--cpu-precision")
NAMES = ("fast", "exact", "llama.cpp")

Measure = Callable[[int, int], float]
"""Tokens per second of the server at a port, with prompts of a seed."""


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
    rates: list[list[float]] = []
    for run in range(runs):
        order = range(len(ports)) if run % 2 == 0 else reversed(range(len(ports)))
        found = {which: measure(ports[which], 1000 * (run + 1)) for which in order}
        rates.append([found[which] for which in range(len(ports))])
    medians = [statistics.median(each) for each in zip(*rates, strict=True)]
    ratios = [statistics.median(rate[which] / rate[-1] for rate in rates) for which in (0, 1)]
    shown = "  ".join(f"{rate:9.1f}" for rate in medians)
    print(f"{what:19}  {shown}   {ratios[0]:.2f}  {ratios[1]:.2f}", flush=True)


def _prefill(port: int, seed: int) -> float:
    text = prompts.text(seed, PREFILL_TOKENS)
    (answer,) = asyncio.run(complete_all(port, [text], 1))
    return PREFILL_TOKENS / _checked(answer).first_s


def _decode(streams: int) -> Measure:
    return lambda port, seed: _answers(port, seed + streams, streams)


def _answers(port: int, seed: int, streams: int) -> float:
    """Return the tokens per second of answers to ``streams`` new prompts at once."""
    texts = [prompts.text(100 * seed + i, PROMPT_TOKENS) for i in range(streams)]
    answers = [_checked(each) for each in asyncio.run(complete_all(port, texts, TOKENS))]
    return sum(each.completion_tokens for each in answers) / max(each.total_s for each in answers)


def _checked(answer: StreamedAnswer) -> StreamedAnswer:
    if answer.error:
        sys.exit(f"a request failed: {answer.error}")
    return answer
