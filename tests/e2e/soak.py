"""A whole server under mixed load: `python -m tests.e2e.soak --minutes 30`.

Rounds of load, each with a pause after it in which everything has to be back where it
was: no sequence, no queue, no memory that is held, no open files of clients that
left. Over all of it the processes must stay the same ones and their memory flat, and a
prompt that comes again must get the same answer. The engine checks its books after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import Server, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUND_S = 30.0
SAMPLE_EVERY_S = 1.0
IDLE_WITHIN_S = 30.0
ANSWER_TOKENS = 24
CLEAR_GAP = 5e-3
"""By how much the best token must lead: rounding is about a thousandth of that."""

GROWTH, GROWTH_BYTES = 0.05, 8 * 2**20
"""How much larger the last third's median of a process's memory may be than the second
third's. The first third is for caches, heaps and the kvstore to fill."""
MORE_FILES = 16
"""Open files of a process when idle, over those at the first pause."""

FLAGS = (
    *("--kv-bits", "16"),
    *("--max-batch-size", "8", "--completion-batch-size", "16", "--max-queue-size", "16"),
    *("--num-blocks", "512", "--ssd-policy", "write_through"),
)
IDLE_METRICS = (
    "active_sequences",
    "queued_requests",
    "mlx_lm_server_engine_waiting_sequences",
    "mlx_lm_server_kv_unevictable_bytes",
)
NO_ROOM = ("queue_full", "too_many_concurrent_requests", "memory_pressure")
"""Refusals that a client has to live with."""
BAD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "a", "temperature": 9}),
    (COMPLETIONS, {"prompt": [5] * 100_000}),
    (COMPLETIONS, {"prompt": "a", "model": "none such"}),
    (COMPLETIONS, {"prompt": "x" * 2**21}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/nothing", {}),
]
WORDS = "the of and to in is that it was for on are as with they be at one have this".split()


@dataclass
class Report:
    """``findings`` is what is wrong, and empty when nothing is. ``memory`` has, by process,
    its resident bytes at each sample."""

    seconds: float
    findings: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    files: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def find(self, what: str) -> None:
        if what not in self.findings and len(self.findings) < 50:
            self.findings.append(what)
            _say(f"WRONG: {what}")

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.done.items()))
        lines = [f"{self.seconds / 60:.1f} min: {counts}"]
        for name, sizes in self.memory.items():
            first, second, last = (statistics.median(third) / 2**20 for third in thirds(sizes))
            open_files = self.files.get(name)
            files = f", files {open_files[0]} -> {open_files[-1]}" if open_files else ""
            lines.append(
                f"{name:20} {first:6.1f} {second:6.1f} {last:6.1f} MB in each third{files}"
            )
        return lines + [f"WRONG: {finding}" for finding in self.findings]


def thirds(sizes: list[int]) -> tuple[list[int], list[int], list[int]]:
    cut = max(1, len(sizes) // 3)
    return sizes[:cut], sizes[cut : 2 * cut] or sizes, sizes[2 * cut :] or sizes


def grows(sizes: list[int], slack_bytes: int = GROWTH_BYTES) -> bool:
    _, second, last = (statistics.median(third) for third in thirds(sizes))
    return last > second * (1 + GROWTH) + slack_bytes


def clear_prompts(model: Path, seed: int) -> list[list[int]]:
    """Prompts whose greedy answers hang on no rounding: of each token, the best one leads
    clearly. Short and long ones, some with a prefix in common."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from tests.oracle import oracle

    language_model = oracle(model).model
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    chance = random.Random(seed)
    head = [chance.randrange(3, vocab_size) for _ in range(300)]
    found: list[list[int]] = []
    for attempt in range(500):
        tail = [chance.randrange(3, vocab_size) for _ in range(chance.choice((3, 15, 16, 17, 90)))]
        prompt = head * (attempt % 2) + tail
        cache = make_prompt_cache(language_model)
        tokens, gap = prompt, float("inf")
        for _ in range(ANSWER_TOKENS):
            logits = language_model(mx.array([tokens]), cache=cache)[0, -1]
            best = mx.sort(logits)[-2:]
            gap = min(gap, (best[1] - best[0]).item())
            tokens = [int(mx.argmax(logits).item())]
        if gap > CLEAR_GAP:
            found.append(prompt)
        if len(found) == 12:
            break
    return found


class Load:
    """Clients that do what clients do, each thing at random."""

    def __init__(self, url: str, prompts: list[list[int]], report: Report, seed: int) -> None:
        self._prompts = prompts
        self._report = report
        self._chance = random.Random(seed)
        self._answers: dict[int, str] = {}
        self._heads = ["".join(self._words(150)) for _ in range(4)]
        self._url = url
        self._client = self._new_client()
        self._kinds: dict[Callable[[], Awaitable[None]], int] = {
            self.ask_again: 8,
            self.ask_after_a_shared_prefix: 4,
            self.converse: 2,
            self.ask_for_several: 2,
            self.stop_at_strings: 2,
            self.leave: 5,
            self.ask_nonsense: 2,
            self.burst: 1,
            self.rest: 2,
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
            self._report.done[name] += 1
            try:
                await kind()
            except (httpx.HTTPError, ValueError, LookupError) as error:
                self._report.find(f"{name}: {error!r}")  # no answer, or one that is none

    # -- kinds of requests ---------------------------------------------------------

    async def ask_again(self) -> None:
        """A greedy request that came before gets the text that it got then."""
        number = self._chance.randrange(len(self._prompts))
        text = await self._complete(
            self._prompts[number], ANSWER_TOKENS, temperature=0, ignore_eos=True
        )
        if text is not None and text != self._answers.setdefault(number, text):
            self._report.find(f"prompt {number}: {text!r} after {self._answers[number]!r}")

    async def ask_after_a_shared_prefix(self) -> None:
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

    async def ask_for_several(self) -> None:
        prompts = ["".join(self._words(20)) for _ in range(self._chance.randrange(1, 4))]
        n = self._chance.randrange(2, 5)
        await self._complete(prompts, 16, n=n, **self._sampling())

    async def stop_at_strings(self) -> None:
        stop = self._chance.sample(["a", "e", "th", " the", "\n", "of and", "x"], 3)
        text = await self._complete("".join(self._words(30)), 100, stop=stop, **self._sampling())
        if text is not None and any(string in text for string in stop):
            self._report.find(f"{text!r} has one of {stop}")

    async def leave(self) -> None:
        """Closes the connection in the middle of something. It is one of its own, since
        httpx does not always close what is cancelled."""
        body = {"prompt": "".join(self._words(80)), "max_tokens": 600, "ignore_eos": True}
        async with self._new_client() as client:
            asking = self._post(COMPLETIONS, body | self._sampling(), client)
            try:
                await asyncio.wait_for(asking, self._chance.choice((0.001, 0.02, 0.1, 0.5, 1.0)))
            except TimeoutError:
                pass

    async def ask_nonsense(self) -> None:
        path, body = self._chance.choice(BAD)
        answer = await self._client.post(path, json=body)
        code = answer.json()["error"]["code"]
        if not 400 <= answer.status_code < 500 and code not in NO_ROOM:
            self._report.find(f"{path} {str(body)[:80]}: {answer.status_code} {answer.text[:200]}")

    async def burst(self) -> None:
        """More at once than the queue takes."""
        asks = (self._complete(f"burst {i} " * 3, 8, temperature=0) for i in range(60))
        await asyncio.gather(*asks)

    async def rest(self) -> None:
        await asyncio.sleep(self._chance.uniform(0, 3))

    # -- asking ----------------------------------------------------------------------

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
        """The text of the first choice; None when there is no room for the request."""
        stream = self._chance.random() < 0.5
        body = {**body, "stream": stream, "stream_options": {"include_usage": True}}
        async with (client or self._client).stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._refused(answer)
                return None
            lines = [line async for line in answer.aiter_lines()]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if not stream:
            events = [json.loads("".join(lines))]
        elif lines[-2:] != ["data: [DONE]", ""]:
            self._report.find(f"a stream ends with {lines[-3:]}")
            return None
        self._check_usage(body, events[-1]["usage"])
        self._report.done["answers"] += 1
        return "".join(
            choice.get("text")
            or choice.get("delta", {}).get("content")
            or choice.get("message", {}).get("content")
            or ""
            for event in events
            for choice in event["choices"]
            if choice["index"] == 0
        )

    def _refused(self, answer: httpx.Response) -> None:
        code = answer.json()["error"]["code"]
        self._report.done[f"refused: {code}"] += 1
        if code not in NO_ROOM or "retry-after" not in answer.headers:
            self._report.find(f"{answer.status_code} {answer.text[:300]}")

    def _check_usage(self, body: dict[str, Any], usage: dict[str, Any]) -> None:
        prompts = body.get("prompt")
        several = isinstance(prompts, list) and isinstance(prompts[0], str)
        choices = body.get("n", 1) * (len(prompts or "") if several else 1)
        least = choices * body["max_tokens"] if body.get("ignore_eos") else choices
        if not least <= usage["completion_tokens"] <= choices * body["max_tokens"]:
            self._report.find(f"{usage} for {str(body)[:200]}")


class Watch:
    """Looks at a server's processes from outside."""

    def __init__(self, server: Server, report: Report) -> None:
        self._server = server
        self._report = report
        self.names = {pid: name for name in PARTS for pid in server.pids(f"services.{name}")}
        self.names[server.process.pid] = "supervisor"

    async def sample(self) -> None:
        while True:
            pids = ",".join(map(str, self.names))
            listing = subprocess.run(
                ["ps", "-o", "pid=,rss=", "-p", pids], capture_output=True, text=True, check=False
            ).stdout
            for line in listing.splitlines():
                pid, kilobytes = map(int, line.split())
                self._report.memory[self.names[pid]].append(kilobytes * 1024)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def wait_idle(self) -> None:
        """Nothing must be left of what clients asked for, soon after the last has gone."""
        deadline = time.monotonic() + IDLE_WITHIN_S
        while left := await asyncio.to_thread(self._left):
            if time.monotonic() > deadline:
                self._report.find(f"left {IDLE_WITHIN_S:g} s after the load: {left}")
                return
            await asyncio.sleep(0.2)

    def measure_idle(self) -> None:
        """What MLX has in use, and open files where the system tells (not on macOS)."""
        active = self._server.metric("mlx_lm_server_active_memory_bytes")
        self._report.memory["engine, MLX idle"].append(int(active))
        for pid, name in self.names.items():
            directory = Path(f"/proc/{pid}/fd")
            if directory.is_dir():
                self._report.files[name].append(len(list(directory.iterdir())))

    def check_processes(self) -> None:
        now = {*self._server.pids("services."), self._server.process.pid}
        if now != set(self.names):
            self._report.find(f"other processes than at first: {now}, {self.names}")

    def _left(self) -> dict[str, float]:
        left = {name: self._server.metric(name) for name in IDLE_METRICS}
        health = self._server.client.get("/health").json()
        left["requests"] = health["requests"]
        left["in engines"] = sum(e["sequences"] for m in health["models"] for e in m["engines"])
        return {name: value for name, value in left.items() if value}


PARTS = ("router", "engine", "kvstore")


def soak(
    model: Path,
    minutes: float,
    *,
    ssd_gb: float = 0.02,
    clients: int = 6,
    seed: int = 0,
    slack_bytes: int = GROWTH_BYTES,
) -> Report:
    """Runs the load on a server of its own, which must serve at the end and stop cleanly."""
    report = Report(minutes * 60)
    prompts = clear_prompts(model, seed)
    flags = (*FLAGS, "--ssd-max-size-gb", str(ssd_gb))
    with serving(model, *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as server:
        asyncio.run(_rounds(server, prompts, report, clients, seed))
        server.complete("still there?", 4)
    if server.process.returncode != 0:
        report.find(f"the server ended with code {server.process.returncode}")
    for line in server.log:
        if re.search(r"Traceback|^\S+ (error|critical) ", line):
            report.find(f"in the log: {line}")
    for name, sizes in report.memory.items():
        if grows(sizes, slack_bytes):
            report.find(f"the memory of {name} grows")
    for name, counts in report.files.items():
        if counts[-1] > counts[0] + MORE_FILES:
            report.find(f"{name} leaves files open: {counts}")
    return report


async def _rounds(
    server: Server, prompts: list[list[int]], report: Report, clients: int, seed: int
) -> None:
    watch = Watch(server, report)
    await watch.wait_idle()
    sampling = asyncio.create_task(watch.sample())
    load = Load(str(server.client.base_url), prompts, report, seed)
    began, told = time.monotonic(), 0
    end = began + report.seconds
    while (now := time.monotonic()) < end:
        await load.run(clients, min(now + ROUND_S, end))
        await watch.wait_idle()
        watch.measure_idle()
        watch.check_processes()
        new, told = server.log[told:], len(server.log)
        for line in new:
            if re.match(r"\S+ (warning|error|critical) |Traceback", line):
                _say(line)
        minutes, answers = (time.monotonic() - began) / 60, report.done["answers"]
        _say(f"{minutes:5.1f} min, {answers} answers, {len(report.findings)} findings")
    await load.close()
    sampling.cancel()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", help="demo or a directory (default: a tiny random one)")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from engine.backend.blas import load_fast_blas

    load_fast_blas()  # before anything imports mlx
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        if options.model is None:
            from tests.tiny_models import make_tiny

            model, ssd_gb = make_tiny("llama", Path(directory) / "tiny"), 0.02
        else:
            from engine.model.load import resolve

            model, ssd_gb = resolve(options.model), 0.5
        report = soak(
            model, options.minutes, ssd_gb=ssd_gb, clients=options.clients, seed=options.seed
        )
    for line in report.lines():
        _say(line)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
