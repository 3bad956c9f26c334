"""A chat beside a batch that fills all rows, and how fast a batch is.

A question is asked alone, beside a batch, and beside as many requests as the batch has lines, in
turn. The batch is compared with the same requests, sent by as many clients as there are rows.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import prompts
from bench.client import complete
from bench.servers import running
from services.commands.batch.client import BatchApi
from services.measuring.answers import StreamedAnswer

ROWS = 8
QUESTIONS, QUESTION_WORDS, QUESTION_TOKENS = 3, 48, 24
LINES, LINE_WORDS, LINE_TOKENS = 24, 48, 40
LONG_TOKENS = 400
POLL_S = 0.05
Times = dict[str, list[float]]


def batches(model: str, runs: int) -> None:
    """First tokens and gaps of a question beside a batch, and tokens a second of a batch."""
    first: Times = defaultdict(list)
    gaps: Times = defaultdict(list)
    rates: Times = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        command = [sys.executable, "-m", "mlx_lm_server", "--model", model, "--host", "127.0.0.1"]
        command += ["--no-ssd", f"--batch-dir={directory}/batches", f"--max-batch-size={ROWS}"]
        with running(command, "/readyz") as (port, _):
            bench = _Bench(port, Path(directory) / "in.jsonl")
            asyncio.run(bench.ask(0))  # warms it up
            for run in range(1, runs + 1):
                for place in ("alone", "beside a batch", "beside requests"):
                    for answer in asyncio.run(bench.asked(place, run)):
                        first[place].append(answer.first_s)
                        gaps[place].append(_mean_gap(answer))
                rates["requests"].append(asyncio.run(bench.requests_rate(run)))
                rates["batch"].append(asyncio.run(bench.batch_rate(run)))
    for what, times in (("first token", first), ("between tokens", gaps)):
        alone = statistics.median(times["alone"])
        for place, found in times.items():
            middle = statistics.median(found)
            print(f"{what} {place}: {middle * 1000:.0f} ms, {middle / alone:.2f} of alone")
    middles = {name: statistics.median(found) for name, found in rates.items()}
    for name, rate in middles.items():
        print(f"{name}: {rate:.1f} tokens/s, {rate / middles['requests']:.2f} of requests")


class _Bench:
    def __init__(self, port: int, path: Path) -> None:
        self._port, self._path = port, path
        self._api = BatchApi(f"http://127.0.0.1:{port}", "")
        self._seed = 0

    async def ask(self, run: int) -> StreamedAnswer:
        self._seed += 1
        prompt = prompts.text(1000 * run + self._seed, QUESTION_WORDS)
        return _checked(await complete(self._port, prompt, QUESTION_TOKENS, ignore_eos=True))

    async def asked(self, place: str, run: int) -> list[StreamedAnswer]:
        if place == "beside requests":
            texts = [prompts.text(run * 7000 + each, LINE_WORDS) for each in range(LINES)]
            streams = [
                asyncio.create_task(complete(self._port, text, LONG_TOKENS, ignore_eos=True))
                for text in texts
            ]
            await asyncio.to_thread(self._wait_for_rows)
            found = [await self.ask(run)]  # one: it waits for a row
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            return found
        if place == "alone":
            return [await self.ask(run) for _ in range(QUESTIONS)]
        batch = await asyncio.to_thread(self._begin, run, LONG_TOKENS)
        await asyncio.to_thread(self._wait_for_rows)
        found = [await self.ask(run) for _ in range(QUESTIONS)]
        await asyncio.to_thread(self._api.cancel, batch)
        await asyncio.to_thread(self._end, batch)
        return found

    async def requests_rate(self, run: int) -> float:
        """Return the tokens a second of requests, as many at once as there are rows."""
        waiting = [prompts.text(run * 9000 + number, LINE_WORDS) for number in range(LINES)]
        began = time.perf_counter()

        async def client() -> int:
            tokens = 0
            while waiting:
                text = waiting.pop()
                answer = await complete(self._port, text, LINE_TOKENS, ignore_eos=True)
                tokens += _checked(answer).completion_tokens
            return tokens

        tokens = sum(await asyncio.gather(*(client() for _ in range(ROWS))))
        return tokens / (time.perf_counter() - began)

    async def batch_rate(self, run: int) -> float:
        began = time.perf_counter()
        batch = await asyncio.to_thread(self._begin, run + 500, LINE_TOKENS)
        completed = await asyncio.to_thread(self._end, batch)
        return completed * LINE_TOKENS / (time.perf_counter() - began)

    def _begin(self, run: int, tokens: int) -> str:
        lines = [_line(run * 5000 + number, tokens) for number in range(LINES)]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self._api.create(self._api.upload(self._path), "/v1/completions", "1h").id

    def _end(self, batch: str) -> int:
        """Wait for the end of a batch; return the lines that were answered."""
        while not (found := self._api.find(batch)).has_ended:
            time.sleep(POLL_S)
        return found.completed

    def _wait_for_rows(self) -> None:
        url = f"http://127.0.0.1:{self._port}/health"
        while True:
            with urllib.request.urlopen(url, timeout=60) as answer:
                engines = [
                    each for model in json.load(answer)["models"] for each in model["engines"]
                ]
            if sum(each["sequences"] for each in engines) >= ROWS:
                return
            time.sleep(POLL_S)


def _line(seed: int, tokens: int) -> dict[str, Any]:
    body = {
        "prompt": prompts.text(seed, LINE_WORDS),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {"custom_id": str(seed), "method": "POST", "url": "/v1/completions", "body": body}


def _checked(answer: StreamedAnswer) -> StreamedAnswer:
    if answer.error:
        sys.exit(f"a request failed: {answer.error} {answer.detail}")
    return answer


def _mean_gap(answer: StreamedAnswer) -> float:
    times: Sequence[float] = answer.times
    return (times[-1] - times[0]) / max(1, len(times) - 1)
