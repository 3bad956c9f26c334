"""A new prompt alone: chunks of the default length beside fixed lengths, and beside arithmetic."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.prompt_times.measuring import FLAGS, Options, first_s, ms
from bench.servers import ours
from bench.turns import median_ratio
from engine.cpu.onnx.graphs import Graph
from engine.model.load import resolve

CASES = {
    "fp32": ("demo-fp32", ()),
    "exact": ("demo", ("--cpu-precision", "exact")),
    "fast": ("demo", ("--cpu-precision", "fast")),
}
LENGTHS, CHECK_LENGTHS = (512, 1000, 2000, 4000, 7500), (512, 1000)
CHUNKS, CHECK_CHUNKS = (128, 256, 512, 1024, 2048), (256, 1024)
DEFAULT, _RATE = 0, -1
_SHAPES, _SECONDS = ((2048, 2048, 2048), (1024, 1536, 1536), (512, 3072, 1024)), 0.5
"""Of products: rows, columns, and what they have in common; each is repeated for so long."""


def alone(options: Options) -> None:
    """Print times to first tokens of new prompts, one client.

    Arithmetic: two operations a parameter of the layers and token, and attention to the half of
    all pairs, at the rate of large fp32 products, which is measured between the prompts: the speed
    of a machine that others use too changes meanwhile, so ratios are medians of the runs' ratios.
    Codes of 4 bits may be faster."""
    lengths = options.lengths or (CHECK_LENGTHS if options.check else LENGTHS)
    chunks = (DEFAULT, *(options.chunks or (CHECK_CHUNKS if options.check else CHUNKS)))
    for name in options.cases or (("fp32",) if options.check else tuple(CASES)):
        model, flags = CASES[name]
        config = json.loads((Path(resolve(model)) / "config.json").read_text())
        print(f"--model {model} {' '.join((*flags, *FLAGS))} --kv-bits 16 [--prefill-chunk-tokens]")
        shown = "".join(f"{size or 'default':>9}" for size in chunks)
        print(f"tokens  GFLOP/s  arithmetic{shown}   to the best fixed   to arithmetic", flush=True)
        with ExitStack() as stack:
            ports = {
                size: options.start(stack, ours(model, *flags, *FLAGS, *fixed(size)))
                for size in chunks
            }
            for tokens in lengths:
                measures: dict[int, Callable[[int], float]] = {
                    size: partial(_first, port=port, tokens=tokens) for size, port in ports.items()
                }
                found = options.in_turn({**measures, _RATE: lambda run: product_rate()})
                rates = found.pop(_RATE)
                _show(tokens, [operations(config, tokens) / rate for rate in rates], rates, found)


def fixed(size: int) -> tuple[str, ...]:
    return ("--prefill-chunk-tokens", str(size)) if size != DEFAULT else ()


def _first(run: int, port: int, tokens: int) -> float:
    return first_s(port, 10_000 * run + tokens, tokens)


def _show(
    tokens: int, least_s: list[float], rates: list[float], found: dict[int, list[float]]
) -> None:
    middle = {size: statistics.median(times) for size, times in found.items()}
    best = min((size for size in middle if size != DEFAULT), key=lambda size: middle[size])
    to_best, to_least = (median_ratio(found[DEFAULT], each) for each in (found[best], least_s))
    shown = "".join(f"{ms(seconds):>9}" for seconds in middle.values())
    print(
        f"{tokens:6d}  {statistics.median(rates) / 1e9:7.0f}  {ms(statistics.median(least_s)):>10}"
        f"{shown}   {to_best:5.2f} ({best})   {to_least:5.2f}",
        flush=True,
    )


def operations(config: dict[str, Any], tokens: int) -> float:
    """Return the floating-point operations of a prompt in the layers of a Llama model."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    weights = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim
    weights += 3 * hidden * config["intermediate_size"]
    attention = 4 * heads * dim * tokens**2 / 2
    return float(config["num_hidden_layers"] * (2.0 * weights * tokens + attention))


def product_rate() -> float:
    """Return the operations per second of large products in ONNX Runtime with all threads, of the
    best of several shapes."""
    random = np.random.default_rng(0)
    best = 0.0
    for rows, columns, inner in _SHAPES:
        graph = Graph()
        weight = graph.constant(random.standard_normal((inner, columns), np.float32), packed=True)
        x = graph.input("x", "rows", inner)
        graph.output(graph.node("MatMul", x, weight), "rows", columns)
        session, values = graph.session(), random.standard_normal((rows, inner), np.float32)
        session(values)
        begun, count = time.perf_counter(), 0
        while (took := time.perf_counter() - begun) < _SECONDS:
            session(values)
            count += 1
        best = max(best, 2.0 * rows * columns * inner * count / took)
    return best
