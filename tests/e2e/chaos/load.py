"""The clients of `tests.e2e.chaos`: they ask, read answers, and judge them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tests.e2e.awake import awake_s, within
from tests.e2e.chaos.questions import CLEAR_GAP, Question, Reply
from tests.e2e.chaos.site import Endpoint
from tests.e2e.process import ROOT
from tests.e2e.soak.report import print_line

HUNG_S = 150.0
"""No request takes that long: the limits of the server are below it."""
CANCELLED, STREAMED = 0.12, 0.6
"""Shares of the requests."""
TEMPORARY = (429, 503, 504)


def documented_errors() -> set[tuple[int, str]]:
    """Return (status, code) of the errors that docs/api.md explains by the server's state."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) \| ([^|]+) \|", page, re.MULTILINE)
    found = {(int(status), code) for status, codes in rows for code in re.findall("`(.+?)`", codes)}
    return {(status, code) for status, code in found if status in TEMPORARY}


class AnswerError(Exception):
    """The server has answered with an error."""

    def __init__(self, status: int, code: str, *, in_stream: bool = False) -> None:
        super().__init__(f"{status} {code}{' in a stream' if in_stream else ''}")
        self.status, self.code = status, code


class Judge:
    """Counts outcomes of requests, and records violations."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.findings: list[str] = []
        self.longest_pause_s = 0.0
        """Between two events of a stream."""
        self.longest_wait_s = 0.0
        """Until the first byte of an answer."""
        self._documented = documented_errors()
        self._ids: set[str] = set()

    def find(self, finding: str) -> None:
        self.findings.append(finding)
        print_line(f"WRONG: {finding}")

    def right(self, question: Question, reply: Reply, expected: Reply) -> None:
        self._know(reply)
        if not reply.is_same(expected):
            self.find(f"{question}: {reply} instead of {expected}")
        self.outcomes["right"] += 1

    def error(self, question: Question, error: AnswerError, reply: Reply, expected: Reply) -> None:
        self._know(reply)
        self.outcomes[str(error)] += 1
        if (error.status, error.code) not in self._documented:
            self.find(f"{question}: {error}")
        self._check_part(question, reply, expected)

    def cut(self, question: Question, why: str, reply: Reply, expected: Reply) -> None:
        """Note an answer that ended before its end for a reason that is known."""
        self._know(reply)
        self.outcomes[why] += 1
        self._check_part(question, reply, expected)

    def _check_part(self, question: Question, reply: Reply, expected: Reply) -> None:
        if not reply.begins(expected):
            self.find(f"{question}: {reply} is no part of {expected}")

    def _know(self, reply: Reply) -> None:
        if len(reply.ids) > 1 or reply.ids & self._ids:
            self.find(f"an id was used before, or there are several: {reply.ids}")
        self._ids |= reply.ids


class Clients:
    """Clients with one API key."""

    def __init__(
        self,
        endpoint: Endpoint,
        key: str,
        judge: Judge,
        answers: Sequence[tuple[Question, Reply]],
        seed: int,
        pace: float = 1,
    ) -> None:
        """``pace`` is a factor of pauses."""
        self._endpoint, self._pace = endpoint, pace
        self._judge = judge
        self._answers = answers
        self._chance = random.Random(f"{seed} {key}")
        self._headers = {"authorization": f"Bearer sk-{key}"}
        self._client = self._new_client()
        self.is_over = False
        """Whether no further requests are sent."""

    async def close(self) -> None:
        await self._client.aclose()

    def _new_client(self) -> httpx.AsyncClient:
        """Return a client without keep-alive, because a reused connection may be closed at that
        moment."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(
            base_url=self._endpoint.url,
            timeout=None,  # `within` measures
            limits=limits,
            headers=self._headers,
            verify=False,
        )

    async def run(self, count: int) -> None:
        """Send requests, ``count`` at once, until it is over."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._one_client())

    async def _one_client(self) -> None:
        while not self.is_over:
            question, expected = self._chance.choice(self._answers)
            self._judge.kinds[question.kind] += 1
            patience_s = 10 ** self._chance.uniform(-2.5, 0.5)
            is_cancelled = self._chance.random() < CANCELLED
            await self.ask(question, expected, patience_s if is_cancelled else None)
            await asyncio.sleep(self._pace * self._chance.choice((0, 0, 0.05, 0.3)))

    async def ask(self, question: Question, expected: Reply, patience_s: float | None) -> None:
        """Ask, and judge what comes. Hang up after ``patience_s``.

        That connection is not of the pool: httpx does not always close a cancelled one.
        """
        if patience_s is None:
            await self._ask(self._client, question, expected, None)
            return
        async with self._new_client() as client:
            await self._ask(client, question, expected, patience_s)

    async def _ask(
        self,
        client: httpx.AsyncClient,
        question: Question,
        expected: Reply,
        patience_s: float | None,
    ) -> None:
        reply, losses, was_down = Reply(), self._endpoint.losses(), self._endpoint.is_down
        try:
            async with asyncio.timeout(patience_s):
                await within(HUNG_S, self._read(client, question, reply))
        except AnswerError as error:
            self._judge.error(question, error, reply, expected)
            await asyncio.sleep(0.2)
        except TimeoutError:
            if patience_s is None:
                self._judge.find(f"{question}: not answered within {HUNG_S:g} s")
            else:
                self._judge.cut(question, "cancelled", reply, expected)
        except httpx.HTTPError as error:
            self._judge.cut(question, "connection lost with the router", reply, expected)
            if not was_down and not await self._endpoint.has_lost_router(losses):
                self._judge.find(f"{question}: {error!r}, but the router was there")
            await asyncio.sleep(0.2)
        else:
            self._judge.right(question, reply, expected)

    async def _read(self, client: httpx.AsyncClient, question: Question, reply: Reply) -> None:
        """Fill ``reply``. Raises: `AnswerError`."""
        streamed = question.can_stream and self._chance.random() < STREAMED
        extra = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        last = time.monotonic()
        async with client.stream("POST", question.path, json=question.body | extra) as answer:
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]
                raise AnswerError(answer.status_code, error["code"])
            if not streamed:
                reply.add(json.loads(await answer.aread()))
                self._judge.longest_wait_s = max(
                    self._judge.longest_wait_s, time.monotonic() - last
                )
                return
            lines: list[str] = []
            async for line in answer.aiter_lines():
                now, is_first = time.monotonic(), not lines
                if line:
                    lines.append(line)
                    self._note_pause(now - last, is_first=is_first)
                    last = now
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _event_error(event["error"])
                    reply.add(event)
        if lines.count("data: [DONE]") != 1 or lines[-1] != "data: [DONE]":
            raise httpx.RemoteProtocolError(f"the stream ends with {lines[-2:]}")
        if not reply.is_complete:
            self._judge.find(f"{question}: a choice did not end, or twice: {reply}")

    def _note_pause(self, seconds: float, *, is_first: bool) -> None:
        judge = self._judge
        if is_first:
            judge.longest_wait_s = max(judge.longest_wait_s, seconds)
        else:
            judge.longest_pause_s = max(judge.longest_pause_s, seconds)


def _event_error(error: dict[str, Any]) -> AnswerError:
    """Return the error of an event, whose status is that of its code elsewhere."""
    code = error["code"]
    statuses = [status for status, known in documented_errors() if known == code]
    return AnswerError(statuses[0] if statuses else 500, code, in_stream=True)


def learn(
    url: str, key: str, questions: Sequence[Question], is_exact: Callable[[str], bool]
) -> list[tuple[Question, Reply]]:
    """Ask an undisturbed server, one question after the other. Return questions and answers.

    Log-probabilities are kept of models that are exact: those whose engine promises the same bits.
    Of others, answers that depend on rounding are left out."""
    asked = []
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=None, headers=headers) as client:
        for question in questions:
            deadline = awake_s() + HUNG_S
            while True:  # a model that is loaded on demand may be late
                answer = client.post(question.path, json=question.body)
                if answer.status_code not in TEMPORARY or awake_s() > deadline:
                    break
                time.sleep(1)
            assert answer.status_code == 200, (question, answer.text)
            reply = Reply()
            reply.add(answer.json())
            asked.append((question, reply))
    exact = [is_exact(question.body["model"]) for question, _ in asked]
    for (_, reply), has_bits in zip(asked, exact, strict=True):
        if not has_bits:
            reply.scores.clear()
    return [
        each
        for each, has_bits in zip(asked, exact, strict=True)
        if has_bits or each[1].least_gap > CLEAR_GAP
    ]
