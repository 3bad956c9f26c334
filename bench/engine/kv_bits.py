"""The savings and the cost of a quantized KV cache, and its effect on the model's answers.

The baseline is the same engine with ``--kv-bits 16``."""

from __future__ import annotations

import statistics
from functools import partial
from itertools import zip_longest
from typing import Literal

from bench import prompts
from bench.in_process import InProcessEngine
from bench.speculation.repetitive import QUESTIONS
from bench.turns import in_turn, median_ratio
from shared import blockfile

BITS: tuple[Literal[16, 8, 4], ...] = (16, 8, 4)
STEPS = 2_000
ANSWER_TOKENS = 220


def kv_bits(model: str, runs: int) -> None:
    """Measure bytes of pages and files, agreement of the most likely tokens, and times of
    steps."""
    drivers: dict[int, InProcessEngine] = {b: InProcessEngine(model, kv_bits=b) for b in BITS}
    _sizes(drivers)
    _agreement(drivers)
    _speed(drivers, runs)


def _sizes(drivers: dict[int, InProcessEngine]) -> None:
    """Print sizes. ``--kv-bits 16`` is the model's own type, which may take 32 bits."""
    print(
        "kv-bits    a page, bytes   its file   of the own type   of 16 bits    pages in its place"
    )
    own = 0
    for bits, driver in drivers.items():
        payload = driver.page(prompts.text(1, 100))
        size = sum(map(len, payload))
        file = len(blockfile.encode(b"\0" * 16, "0" * 32, payload))
        own = own or size
        half = size / own * driver.own_type_bytes / 2
        print(
            f"{bits:7d}  {size:15,d}  {file:9,d}  {size / own:16.3f}  {half:11.3f}"
            f"  {own / size:18.2f} x"
        )


def _agreement(drivers: dict[int, InProcessEngine]) -> None:
    """Compare the most likely tokens at every position of the 16-bit answers."""
    asked, answers = drivers[16].answers(QUESTIONS, ANSWER_TOKENS)
    expected: list[list[int]] = []
    for bits, driver in drivers.items():
        both = zip(asked, answers, strict=True)
        best = [driver.expected(prompt + answer)[len(prompt) - 1 :] for prompt, answer in both]
        expected = expected or best
        rows = zip(best, expected, strict=True)
        pairs = [pair for row in rows for pair in zip_longest(*row)][:STEPS]
        agreed = sum(a == b for a, b in pairs) / len(pairs)
        print(f"{bits} bits: the same most likely token in {agreed:.2%} of {len(pairs)} steps")


def _speed(drivers: dict[int, InProcessEngine], runs: int) -> None:
    for rows in (1, 8, 16):
        texts = [prompts.ids(500 + i, 200) for i in range(rows)]
        measures = [partial(_step_s, drivers[bits], texts) for bits in (8, 16)]
        times = in_turn(measures, runs)
        half, full = (1e3 * statistics.median(each) for each in times)
        print(
            f"decode step of {rows} rows: 16 bits {full:.1f} ms, 8 bits {half:.1f} ms, "
            f"ratio {median_ratio(*times):.3f}"
        )


def _step_s(driver: InProcessEngine, texts: list[list[int]], run: int) -> float:
    return driver.step_s(texts, 20, 2)
