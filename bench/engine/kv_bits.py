"""The savings and the cost of a quantized KV cache, and its effect on the model's answers.

The baseline is the same engine with ``--kv-bits 16``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal

from bench import prompts
from bench.in_process import InProcessEngine
from shared import blockfile

BITS: tuple[Literal[16, 8, 4], ...] = (16, 8, 4)
STEPS = 2_000
ANSWER_TOKENS = 220
QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a fox and a river.",
    "Explain how a bicycle works.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Write a Python function that sorts a list.",
    "Describe the city of Rome to a child.",
    "What should I pack for a week in the mountains?",
    "Summarize the history of the printing press.",
    "How do I learn to play the guitar?",
    "Write a letter to a friend about your holidays.",
    "What are the planets of the solar system?",
    "What is the difference between weather and climate?",
    "Tell me about a day in the life of a baker.",
    "How does a refrigerator stay cold?",
    "Give three tips for a job interview.",
)


def kv_bits(model: str, runs: int) -> None:
    """Measure bytes of blocks and files, agreement of the most likely tokens, and times of
    steps."""
    drivers: dict[int, InProcessEngine] = {b: InProcessEngine(model, kv_bits=b) for b in BITS}
    _sizes(drivers)
    _agreement(drivers)
    _speed(drivers, runs)


def _sizes(drivers: dict[int, InProcessEngine]) -> None:
    """Print sizes. ``--kv-bits 16`` is the model's own type, which may take 32 bits."""
    print(
        "kv-bits   a block, bytes   its file   of the own type   of 16 bits   blocks in its place"
    )
    own = 0
    for bits, driver in drivers.items():
        payload = driver.block(prompts.text(1, 100))
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
        times: dict[int, list[float]] = {16: [], 8: []}
        for run in range(runs):
            for bits in (16, 8) if run % 2 else (8, 16):
                times[bits].append(drivers[bits].step_s(texts, 20, 2))
        _compare(f"decode step of {rows} rows", times)


def _compare(what: str, times: Mapping[int, Sequence[float]]) -> None:
    ratio = statistics.median(a / b for a, b in zip(times[8], times[16], strict=True))
    medians = {bits: statistics.median(each) * 1000 for bits, each in times.items()}
    print(f"{what}: 16 bits {medians[16]:.1f} ms, 8 bits {medians[8]:.1f} ms, ratio {ratio:.3f}")
