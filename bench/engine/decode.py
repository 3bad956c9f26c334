"""Decode steps on a CPU in every precision, beside reading the weights."""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from bench.side import side

SIDES = (
    ("demo-fp32", "exact"),
    *(("demo-4bit", precision) for precision in ("exact", "compact", "fast")),
)
PAIR = 2
"""Rows computed for a single row of codes, so that it has the same bits as among others."""
ROWS = (1, 4, 8, 16)
CONTEXT_TOKENS, STEPS, CHUNK_TOKENS = 200, 8, 256


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


def _print(what: str, times: list[list[float]]) -> None:
    shown = (f"{1e3 * min(each):6.1f} / {1e3 * statistics.median(each):6.1f}" for each in times)
    print(f"{what:>8}  " + "  ".join(f"{each:>15}" for each in shown), flush=True)
