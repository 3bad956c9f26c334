"""Executor steps alone, without scheduler, processes and sockets."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.plan import Chunk, Decode, Plan, fixed_pages
from shared.wire import SamplingParams

if TYPE_CHECKING:  # imports mlx, and the BLAS must be loaded before that
    from engine.executor.base import Executor

WARM_UP_STEPS = 2
CHUNK_TOKENS = 256
"""Chunk size for computing contexts before steps are timed."""


def noise(seed: int, tokens: int) -> list[int]:
    """Return random tokens of a small vocabulary, for tiny models."""
    rng = random.Random(seed)
    return [rng.randrange(10, 300) for _ in range(tokens)]


def chunk_s(executor: Executor, start: int, tokens: int, *, filled: bool = False) -> float:
    """Return the seconds of a chunk of ``tokens`` that begins at position ``start``.

    Unless the positions before it are ``filled``, they contain whatever is in memory."""
    _allocate(executor, 1, start + tokens + 16)
    if filled:
        _fill(executor, [start])
    chunk = Chunk(0, start, tuple(noise(start, tokens)))
    begun = time.perf_counter()
    executor.dispatch(Plan(step=0, chunks=(chunk,))).read()
    seconds = time.perf_counter() - begun
    _free(executor, 1)
    return seconds


class DecodeSteps:
    """Steps of the same sequences, with that many tokens at first. Frees them at the end."""

    def __init__(
        self, executor: Executor, lengths: Sequence[int], steps: int, *, filled: bool = False
    ) -> None:
        self._executor, self._lengths, self._done = executor, lengths, 0
        _allocate(executor, len(lengths), max(lengths) + steps + 16)
        if filled:
            _fill(executor, lengths)

    def __enter__(self) -> DecodeSteps:
        for _ in range(WARM_UP_STEPS):
            self.step_s()
        return self

    def __exit__(self, *_: object) -> None:
        _free(self._executor, len(self._lengths))

    def step_s(self, adapters: Sequence[int] = ()) -> float:
        """Return the seconds of the next step, with the adapters in these places if there are
        any."""
        done, sampling = self._done, SamplingParams(seed=0)
        places = adapters or [0] * len(self._lengths)
        decodes = tuple(
            Decode(row, length + done, None if done else 5, done, sampling, adapter=place)
            for row, (length, place) in enumerate(zip(self._lengths, places, strict=True))
        )
        self._done += 1
        begun = time.perf_counter()
        self._executor.dispatch(Plan(step=0, decodes=decodes)).read()
        return time.perf_counter() - begun


def decode_s(
    executor: Executor, lengths: Sequence[int], steps: int, *, filled: bool = False
) -> float:
    """Return the median seconds of a step of sequences with that many tokens."""
    with DecodeSteps(executor, lengths, steps, filled=filled) as running:
        return statistics.median(running.step_s() for _ in range(steps))


def _allocate(executor: Executor, rows: int, capacity: int) -> None:
    unpacks = executor.spec.unpacked_token_bytes > 0
    plan = fixed_pages(rows, capacity, executor.spec.page_tokens, unpacks=unpacks)
    executor.dispatch(plan).read()


def _free(executor: Executor, rows: int) -> None:
    executor.dispatch(Plan(step=0, freed_slots=tuple(range(rows)))).read()


def _fill(executor: Executor, lengths: Sequence[int]) -> None:
    """Compute that many tokens of each row."""
    for row, length in enumerate(lengths):
        tokens = noise(row, length)
        for start in range(0, length, CHUNK_TOKENS):
            part = tuple(tokens[start : start + CHUNK_TOKENS])
            executor.dispatch(Plan(step=0, chunks=(Chunk(row, start, part),))).read()
