"""Comparisons with raw mlx-lm, without servers, in alternating runs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from bench.side import SIDES, RemoteSide, side
from bench.turns import in_turn, median_ratio

CHUNK_TOKENS = 256
STEPS = 8
RAGGED_ROWS = 16
RAGGED_TOKENS = (50, 2000)


def cpu(model: str, runs: int) -> None:
    """Time chunks of a prompt, and decode steps of sequences of one length."""
    with ExitStack() as stack:
        sides = [stack.enter_context(side(name, model)) for name in SIDES]
        for start in (0, 1000):
            what = f"prefill, {CHUNK_TOKENS} tokens at {start}"
            _compare(what, sides, runs, "prefill", start, CHUNK_TOKENS)
        for rows in (1, 2, 4, 8, 16):
            for length in (50, 1000):
                what = f"decode, {rows} x {length} tokens"
                _compare(what, sides, runs, "decode", [length] * rows, STEPS)


def ragged(model: str, runs: int) -> None:
    """Time steps of 16 sequences of 50 to 2,000 tokens, and of 16 equal ones."""
    rng = random.Random(1)
    mixed = [rng.randint(*RAGGED_TOKENS) for _ in range(RAGGED_ROWS - 2)]
    mixed += RAGGED_TOKENS
    rng.shuffle(mixed)
    long, short = sum(mixed) // len(mixed), RAGGED_TOKENS[0]
    with ExitStack() as stack:
        sides = [stack.enter_context(side(name, model)) for name in SIDES]
        for lengths in (mixed, [long] * RAGGED_ROWS, [short] * RAGGED_ROWS):
            what = f"{RAGGED_ROWS} x {min(lengths)} to {max(lengths)} tokens"
            _compare(what, sides, runs, "generate", lengths, STEPS)


def _compare(what: str, sides: Sequence[RemoteSide], runs: int, call: str, *given: object) -> None:
    """Print medians, and the median of the pairs' ratios; a ratio over 1 means that this server
    is faster."""

    def measure(one: RemoteSide, run: int) -> float:
        return one.call(call, *given)

    times = in_turn([partial(measure, one) for one in sides], runs)
    ours, theirs = (1e3 * statistics.median(each) for each in times)
    ratio = median_ratio(times[1], times[0])
    print(f"{what:34} {ours:7.1f} ms, mlx-lm {theirs:7.1f} ms: {ratio:.2f} x as fast", flush=True)
