"""What the same bits cost: steps and chunks by default, beside those with `--no-deterministic`.

One engine computes both in turn: the steps of two engines with equal settings differ by several per
cent, by where their memory lies.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from bench.side import OurSide, RemoteSide, answer, side

BY_DEFAULT, WITHOUT = "by default", "--no-deterministic"
ROWS, CONTEXTS, CHUNKS = (1, 4, 8, 16), (200, 1000), ((0, 256), (1000, 256))
STEPS = 8


def same_bits(model: str, runs: int) -> None:
    """Print the shortest of steps and chunks in turn, in ms, the ratio of the shortest, and the
    median of the ratios of two that follow each other."""
    with side("ours", model, "auto", "bench.engine.same_bits") as one:
        print(f"{'':>22}  {BY_DEFAULT:>12}  {WITHOUT:>18}  ratio  median", flush=True)
        for context in CONTEXTS:
            for rows in ROWS:
                what = f"{rows} rows, {context} tokens"
                _compare(one, runs, what, "decode", [context] * rows, STEPS)
        for start, tokens in CHUNKS:
            _compare(one, runs, f"{tokens} tokens from {start}", "prefill", start, tokens)


def _compare(one: RemoteSide, runs: int, what: str, method: str, *arguments: Any) -> None:
    pairs = []
    for number in range(2 * runs):
        found = {}
        for promised in (True, False) if number % 2 else (False, True):
            one.call("promise", promised)
            found[promised] = 1e3 * one.call(method, *arguments)
        pairs.append((found[True], found[False]))
    ours, theirs = (min(each) for each in zip(*pairs, strict=True))
    median = statistics.median(with_it / without for with_it, without in pairs)
    print(
        f"{what:>22}  {ours:12.1f}  {theirs:18.1f}  {ours / theirs:5.2f}  {median:6.2f}", flush=True
    )


class EitherSide(OurSide):
    """An engine that computes the same bits or not, by turns."""

    def promise(self, bits: bool) -> float:
        """Compute the same bits from now on, or as with `--no-deterministic`."""
        batches: Any = self._executor
        batches.batch_class.deterministic = False
        if bits and not batches.make_deterministic():
            raise RuntimeError("the engine cannot give the same bits")
        return 0.0


def main(name: str, model: str, precision: str) -> None:
    answer(lambda: EitherSide(model, precision))


if __name__ == "__main__":
    main(*sys.argv[1:])
