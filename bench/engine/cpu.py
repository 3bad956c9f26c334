"""Comparisons with raw mlx-lm, without servers, in alternating runs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from bench.side import SIDES, RemoteSide, side

CHUNK_TOKENS = 256
STEPS = 8
CONTEXT_TOKENS = 200
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
        for rows in (1, 8, 16):
            _beside_reading(sides[SIDES.index("ours")], rows, runs)


def _beside_reading(ours: RemoteSide, rows: int, runs: int) -> None:
    """Print the shortest decode step, and how often the weights could have been read in that
    time.

    Both are the shortest of several, measured in turn: other programs only add time."""
    steps, readings = [], []
    for _ in range(4 * runs):
        steps.append(ours.call("decode", [CONTEXT_TOKENS] * rows, STEPS))
        readings.append(ours.call("read"))
    what = f"decode, {rows} x {CONTEXT_TOKENS} tokens"
    step, reading = 1e3 * min(steps), 1e3 * min(readings)
    print(
        f"{what:34} {step:7.1f} ms, reading {reading:6.1f} ms: {step / reading:.2f} times reading",
        flush=True,
    )


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
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(runs):
        for which in (0, 1) if run % 2 == 0 else (1, 0):
            times[which].append(sides[which].call(call, *given))
    ours, theirs = (1e3 * statistics.median(each) for each in times)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    print(f"{what:34} {ours:7.1f} ms, mlx-lm {theirs:7.1f} ms: {ratio:.2f} x as fast", flush=True)
