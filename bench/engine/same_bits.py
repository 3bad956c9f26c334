"""The cost of the same bits: steps and chunks by default, beside those with `--no-deterministic`.

One engine computes both in turn, step by step on the same sequences: the steps of two engines with
equal settings, or of rows in other places of memory, differ by several per cent. Each run has other
lengths.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

from bench.executor_steps import DecodeSteps
from bench.side import OurSide, RemoteSide, answer, side

BY_DEFAULT, WITHOUT = "by default", "--no-deterministic"
ROWS, CONTEXTS, CHUNKS = (1, 4, 8, 16), (200, 1000), ((0, 256), (1000, 256))
PAIRS_OF_A_RUN, CHUNK_PAIRS_OF_A_RUN = 10, 2
RUNS_DIFFER_BY = 16
"""Positions by which the rows of a run are longer than those of the one before."""


def same_bits(model: str, runs: int) -> None:
    """Print the shortest of steps and chunks in turn, in ms, the ratio of the shortest, and the
    median of the ratios of two that follow each other."""
    with side("ours", model, "auto", "bench.engine.same_bits") as one:
        print(f"{'':>22}  {BY_DEFAULT:>12}  {WITHOUT:>18}  ratio  median", flush=True)
        for context in CONTEXTS:
            for rows in ROWS:
                median = one.call("steps", rows, context, runs)
                _show(one, f"{rows} rows, {context} tokens", median)
        for start, tokens in CHUNKS:
            median = one.call("chunks", start, tokens, runs * CHUNK_PAIRS_OF_A_RUN)
            _show(one, f"{tokens} tokens from {start}", median)


def _show(one: RemoteSide, what: str, median: float) -> None:
    ours, theirs = 1e3 * one.call("shortest", True), 1e3 * one.call("shortest", False)
    print(
        f"{what:>22}  {ours:12.1f}  {theirs:18.1f}  {ours / theirs:5.2f}  {median:6.2f}", flush=True
    )


class EitherSide(OurSide):
    """An engine that computes the same bits or not, by turns."""

    def __init__(self, model: str, precision: str) -> None:
        super().__init__(model, precision)
        self._pairs: list[dict[bool, float]] = []

    def steps(self, rows: int, context: int, runs: int) -> float:
        """Return the median ratio of steps that follow each other, with the same bits and without.

        The rows of each run have another length, and so another place in memory."""
        self._pairs = []
        for run in range(runs):
            lengths = [context + run * RUNS_DIFFER_BY] * rows
            with DecodeSteps(self._executor, lengths, 2 * PAIRS_OF_A_RUN + 2) as steps:
                self._pair(steps.step_s, first=True)  # each binds its own arguments first
                self._add(PAIRS_OF_A_RUN, steps.step_s)
        return self._median

    def chunks(self, start: int, tokens: int, pairs: int) -> float:
        """Return the same ratio of chunks."""
        self._pairs = []
        self._add(pairs, lambda: self.prefill(start, tokens))
        return self._median

    def shortest(self, promised: bool) -> float:
        """Return the shortest time of either kind."""
        return min(pair[promised] for pair in self._pairs)

    @property
    def _median(self) -> float:
        return statistics.median(pair[True] / pair[False] for pair in self._pairs)

    def _add(self, pairs: int, measure: Callable[[], float]) -> None:
        self._pairs += [self._pair(measure, number % 2 == 0) for number in range(pairs)]

    def _pair(self, measure: Callable[[], float], first: bool) -> dict[bool, float]:
        found = {}
        for promised in (first, not first):
            self._promise(promised)
            found[promised] = measure()
        return found

    def _promise(self, bits: bool) -> None:
        """Compute the same bits from now on, or as with `--no-deterministic`."""
        batches: Any = self._executor
        batches.batch_class.deterministic = False
        if bits and not batches.make_deterministic():
            raise RuntimeError("the engine cannot give the same bits")


def main(name: str, model: str, precision: str) -> None:
    answer(lambda: EitherSide(model, precision))


if __name__ == "__main__":
    main(*sys.argv[1:])
