"""The shared parts of `bench.prompt_times`: options, clients, figures."""

from __future__ import annotations

import asyncio
import fcntl
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench import prompts
from services.measuring.answers import StreamedAnswer
from services.measuring.client import ApiClient

FLAGS = ("--no-ssd", "--max-generation-tokens", "8000", "--spare-engine-after-s", "0")
"""Spare engines would start while others are timed: each imports for some seconds."""
STREAM_PROMPT_TOKENS, STREAM_TOKENS = 40, 1500
TURN_S = 30.0
WARM_UP_TOKENS = (300, 32)
"""Length of prompts from which a server learns its first chunks."""

Name = TypeVar("Name")


@dataclass(frozen=True)
class Options:
    """How a part is run."""

    runs: int = 3
    check: bool = False
    """Whether to check only that the part works: one run, short prompts, fewer cases."""
    lock: Path | None = None
    """A file that is locked while something is timed, so that several programs take turns.
    Servers are started under a shared lock."""
    cases: tuple[str, ...] = ()
    """Of `alone` and `first_minute`."""
    lengths: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    """Of `alone`: the fixed lengths of chunks."""
    full: bool = False
    """Of `joins`: whether the cache is full before anything is measured."""

    @contextmanager
    def locked(self, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Hold the lock inside this context."""
        with nullcontext() if self.lock is None else self.lock.open("ab") as file:
            if file is not None:
                fcntl.flock(file, kind)
            yield

    def start(self, stack: ExitStack, server: AbstractContextManager[int]) -> int:
        """Start a server, send a request for everything that it prepares only once, and return
        its port."""
        with self.locked(fcntl.LOCK_SH):
            port = stack.enter_context(server)
            for number, tokens in enumerate(WARM_UP_TOKENS):
                first_s(port, 900_000 + number, tokens)
        return port

    def in_turn(self, measures: Mapping[Name, Callable[[int], float]]) -> dict[Name, list[float]]:
        """Call each of ``measures`` with the number of each run; every second run backwards.

        The lock is released after `TURN_S`."""
        found: dict[Name, list[float]] = {name: [] for name in measures}
        with ExitStack() as turn:
            ends = 0.0
            for run in range(self.runs):
                for name in measures if run % 2 == 0 else reversed(list(measures)):
                    if time.monotonic() > ends:
                        turn.close()
                        turn.enter_context(self.locked())
                        ends = time.monotonic() + TURN_S
                    found[name].append(measures[name](run))
        return found


def first_s(port: int, seed: int, tokens: int) -> float:
    """Return the seconds to the first token of a new prompt, the only request of the server."""
    return asyncio.run(first_s_of(port, prompts.text(seed, tokens)))


async def first_s_of(port: int, prompt: str) -> float:
    """Return the seconds to the end of an answer of one token: a token's text may be empty."""
    with closing(ApiClient(f"http://127.0.0.1:{port}")) as client:
        return await ask(client, prompt)


async def ask(client: ApiClient, prompt: str) -> float:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0}
    answer = await client.stream("/completions", body)
    if answer.error not in (None, "no token"):
        sys.exit(f"a request failed: {answer.error} {answer.detail}")
    return answer.total_s


@asynccontextmanager
async def streams(port: int, count: int, seed: int) -> AsyncIterator[list[StreamedAnswer]]:
    """Run ``count`` answers, all of which have begun, and cancel them at the end."""
    answers = [StreamedAnswer() for _ in range(count)]
    begun = [asyncio.Event() for _ in answers]
    with closing(ApiClient(f"http://127.0.0.1:{port}")) as client:
        tasks = [
            asyncio.create_task(
                client.stream(
                    "/completions",
                    {
                        "prompt": prompts.text(seed + number, STREAM_PROMPT_TOKENS),
                        "max_tokens": STREAM_TOKENS,
                        "temperature": 0.0,
                        "ignore_eos": True,
                    },
                    answer,
                    begun[number].set,
                )
            )
            for number, answer in enumerate(answers)
        ]
        try:
            for event in begun:
                await event.wait()
            yield answers
            if ended := [task.result() for task in tasks if task.done()]:
                sys.exit(f"a stream ended: {ended[0].error or ended[0].finish_reason}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def gaps_s(answers: Sequence[StreamedAnswer], since: float, until: float) -> list[float]:
    """Return the times between texts that overlap the interval between two times of
    time.perf_counter."""
    return [
        after - before
        for answer in answers
        for before, after in zip(answer.times, answer.times[1:], strict=False)
        if answer.began + after > since and answer.began + before < until
    ]


def texts_in(answers: Sequence[StreamedAnswer], since: float, until: float) -> int:
    """Return the number of texts that arrived between two times of time.perf_counter."""
    return sum(since < answer.began + at <= until for answer in answers for at in answer.times)


async def step_s(answers: Sequence[StreamedAnswer], seconds: float) -> tuple[float, float]:
    """Return the median time between texts, and the texts per second, of the next ``seconds``."""
    begun = time.perf_counter()
    await asyncio.sleep(seconds)
    ended = time.perf_counter()
    rate = texts_in(answers, begun, ended) / (ended - begun)
    return statistics.median(gaps_s(answers, begun, ended)), rate


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
