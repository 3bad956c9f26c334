"""What the same bits cost: steps and chunks by default, beside those with `--no-deterministic`."""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack

from bench.side import OurSide, answer, side

BY_DEFAULT, WITHOUT = "by default", "--no-deterministic"
ROWS, CONTEXTS, CHUNKS = (1, 4, 8, 16), (200, 1000), ((0, 256), (1000, 256))
STEPS = 8


def same_bits(model: str, runs: int) -> None:
    """Print the shortest of steps and chunks in turn, in ms, the ratio of the shortest, and the
    median of the ratios of two that follow each other."""
    with ExitStack() as stack:
        sides = [
            stack.enter_context(side(name, model, "auto", "bench.engine.same_bits"))
            for name in (BY_DEFAULT, WITHOUT)
        ]
        print(f"{'':>22}  {BY_DEFAULT:>12}  {WITHOUT:>18}  ratio  median", flush=True)
        for context in CONTEXTS:
            for rows in ROWS:
                pairs = [
                    [one.call("decode", [context] * rows, STEPS) for one in sides]
                    for _ in range(2 * runs)
                ]
                _print(f"{rows} rows, {context} tokens", pairs)
        for start, tokens in CHUNKS:
            pairs = [[one.call("prefill", start, tokens) for one in sides] for _ in range(2 * runs)]
            _print(f"{tokens} tokens from {start}", pairs)


def _print(what: str, pairs: list[list[float]]) -> None:
    ours, theirs = (1e3 * min(each) for each in zip(*pairs, strict=True))
    median = statistics.median(with_it / without for with_it, without in pairs)
    print(
        f"{what:>22}  {ours:12.1f}  {theirs:18.1f}  {ours / theirs:5.2f}  {median:6.2f}", flush=True
    )


def main(name: str, model: str, precision: str) -> None:
    answer(lambda: OurSide(model, precision, deterministic=name == BY_DEFAULT))


if __name__ == "__main__":
    main(*sys.argv[1:])
