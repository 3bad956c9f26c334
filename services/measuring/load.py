"""Load patterns: closed loop, open loop, and a long prompt that joins running streams."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.measuring.answers import StreamedAnswer
from services.measuring.client import ApiClient
from services.measuring.workloads import (
    Asking,
    Conversation,
    Question,
    TokenRange,
    WorkloadShape,
    conversations,
    said,
)

JOINER_TOKENS = 8
"""Max tokens of the answer to a joining prompt."""


class LoadRecord(NamedTuple):
    """A request that ended by itself."""

    group: str
    answer: StreamedAnswer


class JoinRecord(NamedTuple):
    """The effects of streams and joiner on each other."""

    gaps_s: list[float]
    """The longest time without a token of each running stream, from the joiner's request to its
    last token."""
    alone: StreamedAnswer
    joiner: StreamedAnswer


@dataclass
class Recorder:
    """Collects results; ``on_record`` is called with each request."""

    on_record: Callable[[LoadRecord], None] = lambda _: None
    records: list[LoadRecord] = field(default_factory=list)
    joins: list[JoinRecord] = field(default_factory=list)
    cancelled: int = 0
    """Requests cancelled because the measurement ended."""

    def add(self, group: str, answer: StreamedAnswer) -> None:
        self.records.append(LoadRecord(group, answer))
        self.on_record(self.records[-1])


Hold = Callable[[Conversation], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Loader:
    """Generates load on one server."""

    client: ApiClient
    asking: Asking
    recorder: Recorder
    ends_s: float = math.inf
    """When (`time.monotonic`) conversations stop: after that no further question is sent."""

    async def hold(self, conversation: Conversation) -> None:
        """Send all questions of a conversation, each after the previous answer."""
        before: list[dict[str, str]] = []
        for question in conversation.questions:
            if time.monotonic() >= self.ends_s:
                return
            answer = await self._ask(question, before)
            self.recorder.add(question.group, answer)
            if answer.error:
                return
            before += [said(question), {"role": "assistant", "content": answer.text}]

    async def join(self, workload: WorkloadShape, streams: int, seed: int) -> None:
        """Add a prompt of ``join_tokens`` to ``streams``, after sending a similar one alone."""
        long = workload._replace(
            input_tokens=TokenRange(workload.join_tokens, workload.join_tokens),
            output_tokens=TokenRange(JOINER_TOKENS, JOINER_TOKENS),
        )
        alone, joining = itertools.islice(conversations(long, seed), 2)
        first = await self._ask(alone.questions[0])
        self.recorder.add("long prompt alone", first)
        others = itertools.islice(conversations(workload, seed + 1), streams)
        async with self._streams([each.questions[0] for each in others]) as running:
            answer = await self._ask(joining.questions[0])
            end = time.perf_counter()
            gaps = [gap for each in running if (gap := longest_gap(each, answer.began, end))]
        self.recorder.add("joiner", answer)
        for each in running:
            if each.error:
                self.recorder.add("stream", each)
        self.recorder.joins.append(JoinRecord(gaps, first, answer))

    @asynccontextmanager
    async def _streams(self, questions: list[Question]) -> AsyncIterator[list[StreamedAnswer]]:
        """Stream answers to all ``questions``; begin when each has text, and cancel them at the
        end."""
        answers = [StreamedAnswer() for _ in questions]
        begun = [asyncio.Event() for _ in questions]
        tasks = [
            asyncio.create_task(
                self.client.stream(
                    self.asking.path, self.asking.body(question, []), answer, event.set
                )
            )
            for question, answer, event in zip(questions, answers, begun, strict=True)
        ]
        try:
            for event in begun:
                await event.wait()
            yield answers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(
        self, question: Question, before: list[dict[str, str]] | None = None
    ) -> StreamedAnswer:
        body = self.asking.body(question, before or [])
        try:
            return await self.client.stream(self.asking.path, body)
        except asyncio.CancelledError:
            self.recorder.cancelled += 1
            raise


def longest_gap(answer: StreamedAnswer, start: float, end: float) -> float | None:
    """Return the longest time without text that overlaps the time from ``start`` to ``end``. None
    for an answer that ended before."""
    at = [answer.began + each for each in answer.times]
    if answer.error or answer.finish_reason:
        end = min(end, at[-1]) if at else start
    if end <= start:
        return None
    before = max((each for each in at if each <= start), default=answer.began)
    points = [before, *(each for each in at if start < each <= end), end]
    return max(b - a for a, b in itertools.pairwise(points))


async def closed_loop(given: Iterator[Conversation], clients: int, hold: Hold) -> None:
    """Run conversations with ``clients`` clients, each one conversation after the other."""

    async def client() -> None:
        for conversation in given:
            await hold(conversation)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def open_loop(
    given: Iterator[Conversation],
    rate: float,
    burstiness: float,
    rng: random.Random,
    hold: Hold,
    ends_s: float = math.inf,
) -> None:
    """Start ``rate`` conversations per second, whether or not others have ended, none after
    ``ends_s`` (`time.monotonic`)."""
    at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for conversation, gap in zip(given, arrival_gaps(rate, burstiness, rng), strict=False):
            if at > ends_s:
                break
            await asyncio.sleep(at - time.monotonic())
            group.create_task(hold(conversation))
            at += gap


def arrival_gaps(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield the seconds between arrivals, with ``rate`` arrivals per second on average.

    They have a gamma distribution of shape ``burstiness``: 1 is a Poisson process, lower values are
    burstier, higher ones more regular (like vLLM's ``--burstiness``)."""
    while True:
        yield rng.gammavariate(burstiness, 1 / (rate * burstiness))


def limited(
    given: Iterator[Conversation], count: int | None, ends_s: float
) -> Iterator[Conversation]:
    """Yield ``count`` of ``given`` (None: all), and none after ``ends_s`` (`time.monotonic`)."""
    for conversation in itertools.islice(given, count):
        if time.monotonic() >= ends_s:
            return
        yield conversation


async def until(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Await ``work``, and cancel it once ``stop`` is set."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
    with suppress(asyncio.CancelledError):
        await working
