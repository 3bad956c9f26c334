"""The random load of `tests.e2e.soak`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.e2e.soak.report import MORE_FILES, Report

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANSWER_TOKENS = 24
NO_ROOM = ("queue_full", "too_many_concurrent_requests", "memory_pressure")
"""Refusals that are correct under load."""
BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}),
    (COMPLETIONS, {"prompt": "a", "temperature": 9}),
    (COMPLETIONS, {"prompt": [5] * 100_000}),
    (COMPLETIONS, {"prompt": "a", "model": "none such"}),
    (COMPLETIONS, {"prompt": "x" * 2**21}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/nothing", {}),
]
WORDS = "the of and to in is that it was for on are as with they be at one have this".split()


class Load:
    """Clients that send requests of random kinds."""

    def __init__(
        self, url: str, prompts: list[list[int]], report: Report, seed: int, *, exact: bool
    ) -> None:
        """``exact``: whether repeated prompts must get the same log-probabilities too."""
        self._prompts, self._exact = prompts, exact
        self._report = report
        self._chance = random.Random(seed)
        self._answers: dict[int, tuple[str, list[float]]] = {}
        self._heads = ["".join(self._words(150)) for _ in range(4)]
        self._url = url
        self._client = self._new_client()
        self._kinds: dict[Callable[[], Awaitable[None]], int] = {
            self.repeat_greedy: 8,
            self.share_prefix: 4,
            self.converse: 2,
            self.several_choices: 2,
            self.stop_strings: 2,
            self.disconnect: 5,
            self.bad_request: 2,
            self.burst: 1,
            self.pause: 2,
        }

    async def run(self, clients: int, until: float) -> None:
        await asyncio.gather(*(self._client_until(until) for _ in range(clients)))

    async def close(self) -> None:
        await self._client.aclose()

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MORE_FILES // 2)
        return httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits, verify=False)

    async def _client_until(self, until: float) -> None:
        kinds, weights = list(self._kinds), list(self._kinds.values())
        while time.monotonic() < until:
            (kind,) = self._chance.choices(kinds, weights)
            name = kind.__name__.replace("_", " ")
            self._report.counts[name] += 1
            try:
                await kind()
            except (httpx.HTTPError, ValueError, LookupError) as error:
                self._report.add_finding(f"{name}: {error!r}")  # no answer, or a malformed one

    # -- kinds of requests ---------------------------------------------------------

    async def repeat_greedy(self) -> None:
        """Repeat a greedy request. It must get the same answer every time."""
        number = self._chance.randrange(len(self._prompts))
        body = {"prompt": self._prompts[number], "max_tokens": ANSWER_TOKENS, "temperature": 0}
        events = await self._events(COMPLETIONS, body | {"ignore_eos": True, "logprobs": 1})
        if events is None:
            return
        answer = _text(events), _scores(events) if self._exact else []
        self._report.counts["repeated answers"] += number in self._answers
        if answer != self._answers.setdefault(number, answer):
            self._report.add_finding(f"prompt {number}: {answer!r} after {self._answers[number]!r}")

    async def share_prefix(self) -> None:
        tail = "".join(self._words(self._chance.randrange(1, 60)))
        prompt = self._chance.choice(self._heads) + tail
        await self._complete(prompt, self._chance.randrange(1, 80), **self._sampling())

    async def converse(self) -> None:
        messages: list[dict[str, str]] = []
        for _ in range(self._chance.randrange(1, 6)):
            messages.append({"role": "user", "content": "".join(self._words(12))})
            body = {"messages": messages, "max_tokens": 20, **self._sampling()}
            text = await self._post(CHAT, body)
            if text is None:
                return
            messages.append({"role": "assistant", "content": text})

    async def several_choices(self) -> None:
        prompts = ["".join(self._words(20)) for _ in range(self._chance.randrange(1, 4))]
        n = self._chance.randrange(2, 5)
        await self._complete(prompts, 16, n=n, **self._sampling())

    async def stop_strings(self) -> None:
        stop = self._chance.sample(["a", "e", "th", " the", "\n", "of and", "x"], 3)
        text = await self._complete("".join(self._words(30)), 100, stop=stop, **self._sampling())
        if text is not None and any(string in text for string in stop):
            self._report.add_finding(f"{text!r} contains one of {stop}")

    async def disconnect(self) -> None:
        """Disconnect in the middle of a request.

        The connection is not of the pool: httpx does not always close a cancelled one.
        """
        body = {"prompt": "".join(self._words(80)), "max_tokens": 600, "ignore_eos": True}
        async with self._new_client() as client:
            request = self._post(COMPLETIONS, body | self._sampling(), client)
            try:
                await asyncio.wait_for(request, self._chance.choice((0.001, 0.02, 0.1, 0.5, 1.0)))
            except TimeoutError:
                pass

    async def bad_request(self) -> None:
        path, body = self._chance.choice(BAD_REQUESTS)
        answer = await self._client.post(path, json=body)
        code = answer.json()["error"]["code"]
        if not 400 <= answer.status_code < 500 and code not in NO_ROOM:
            self._report.add_finding(
                f"{path} {str(body)[:80]}: {answer.status_code} {answer.text[:200]}"
            )

    async def burst(self) -> None:
        """Send more requests at once than the queue holds."""
        requests = (self._complete(f"burst {i} " * 3, 8, temperature=0) for i in range(60))
        await asyncio.gather(*requests)

    async def pause(self) -> None:
        await asyncio.sleep(self._chance.uniform(0, 3))

    # -- sending ----------------------------------------------------------------------

    def _words(self, count: int) -> list[str]:
        return [self._chance.choice(WORDS) + " " for _ in range(count)]

    def _sampling(self) -> dict[str, Any]:
        if self._chance.random() < 0.3:
            return {"temperature": 0}
        choices: tuple[dict[str, Any], ...] = (
            {},
            {"top_p": 0.9},
            {"top_k": 20},
            {"min_p": 0.05},
            {"seed": 7},
        )
        return {"temperature": 1.0, **self._chance.choice(choices)}

    async def _complete(self, prompt: Any, max_tokens: int, **fields: Any) -> str | None:
        return await self._post(COMPLETIONS, {"prompt": prompt, "max_tokens": max_tokens, **fields})

    async def _post(
        self, path: str, body: dict[str, Any], client: httpx.AsyncClient | None = None
    ) -> str | None:
        """Return the text of the first choice; None if the server has no room for the request."""
        events = await self._events(path, body, client)
        return None if events is None else _text(events)

    async def _events(
        self, path: str, body: dict[str, Any], client: httpx.AsyncClient | None = None
    ) -> list[dict[str, Any]] | None:
        """Return the events of a stream, or the whole answer; None if there is no room for it."""
        stream = self._chance.random() < 0.5
        body = {**body, "stream": stream, "stream_options": {"include_usage": True}}
        async with (client or self._client).stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._check_refusal(answer)
                return None
            lines = [line async for line in answer.aiter_lines()]
        events: list[dict[str, Any]]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if not stream:
            events = [json.loads("".join(lines))]
        elif lines[-2:] != ["data: [DONE]", ""]:
            self._report.add_finding(f"a stream ends with {lines[-3:]}")
            return None
        self._check_usage(body, events[-1]["usage"])
        self._report.counts["answers"] += 1
        return events

    def _check_refusal(self, answer: httpx.Response) -> None:
        code = answer.json()["error"]["code"]
        self._report.counts[f"refused: {code}"] += 1
        if code not in NO_ROOM or "retry-after" not in answer.headers:
            self._report.add_finding(f"{answer.status_code} {answer.text[:300]}")

    def _check_usage(self, body: dict[str, Any], usage: dict[str, Any]) -> None:
        prompts = body.get("prompt")
        several = isinstance(prompts, list) and isinstance(prompts[0], str)
        choices = body.get("n", 1) * (len(prompts or "") if several else 1)
        least = choices * body["max_tokens"] if body.get("ignore_eos") else choices
        if not least <= usage["completion_tokens"] <= choices * body["max_tokens"]:
            self._report.add_finding(f"{usage} for {str(body)[:200]}")


def _text(events: list[dict[str, Any]]) -> str:
    """Return the text of the first choice."""
    return "".join(
        choice.get("text")
        or choice.get("delta", {}).get("content")
        or choice.get("message", {}).get("content")
        or ""
        for event in events
        for choice in event["choices"]
        if choice["index"] == 0
    )


def _scores(events: list[dict[str, Any]]) -> list[float]:
    """Return the log-probability of each token of a completion."""
    return [
        score
        for event in events
        for choice in event["choices"]
        for score in (choice.get("logprobs") or {}).get("token_logprobs") or []
    ]
