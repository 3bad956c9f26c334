"""The first requests of a process beside later ones: what a start leaves to be learned, allocated
or compiled."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench import prompts
from bench.prompt_times.measuring import Options, first_s, first_s_of, gaps_s, ms, streams
from bench.servers import running
from engine.model.load import resolve
from services.measuring.answers import StreamedAnswer
from services.measuring.client import ApiClient
from shared.paths import user_cache

MODEL = "demo"
FLAGS = ("--spare-engine-after-s", "0")
QUESTION_TOKENS, LATER_QUESTIONS = 30, 8
STREAMS, JOINER_TOKENS, LATER_JOINS = 4, 2000, 3
PREFIX_TOKENS, TAIL_TOKENS, LATER_PREFIXES = 1648, 8, 4
_BEFORE_JOIN_S = 1.0


class Found(NamedTuple):
    """A figure of one process: of the first request, and the median of later ones."""

    first_s: float
    later_s: float

    @property
    def ratio(self) -> float:
        return self.first_s / self.later_s


def first_minute(options: Options) -> None:
    """Print what a process's first requests take beside later ones: a question after an
    installation and after later starts, a prompt that joins streams, and prefixes on SSD.

    Each run starts servers with the default flags, without a spare engine that would start while
    others are timed."""
    print(f"--model {MODEL} {' '.join(FLAGS)}: first request, median of later ones, ratio")
    wanted = options.cases or tuple(CASES)
    found: dict[str, list[Found]] = {}
    for _ in range(options.runs):
        for case in wanted:
            with tempfile.TemporaryDirectory(prefix="bench-") as scratch, options.locked():
                for name, one in CASES[case](Path(scratch), options.check).items():
                    found.setdefault(name, []).append(one)
    for name, each in found.items():
        shown = "; ".join(
            f"{ms(one.first_s)}, {ms(one.later_s)}, {one.ratio:.2f}" if one.later_s else ms(one[0])
            for one in each
        )
        print(f"{name}: {shown}", flush=True)


def questions(scratch: Path, check: bool) -> dict[str, Found]:
    """Measure first tokens of short prompts, after an installation and after a later start."""
    found = {}
    for name in ("after an installation", "after a later start"):
        with _server(scratch, cache=scratch / "cache") as (port, start_s):
            times = [_question_s(port, number) for number in range(LATER_QUESTIONS + 1)]
        found[f"start {name}"] = Found(start_s, 0.0)
        found[f"question of {QUESTION_TOKENS} tokens {name}"] = _found(times)
    return found


def _question_s(port: int, number: int) -> float:
    message = {"role": "user", "content": prompts.text(number, QUESTION_TOKENS)}
    body = {"messages": [message], "max_tokens": 1, "temperature": 0.0}
    return asyncio.run(_stream(port, "/chat/completions", body)).total_s


def joins(scratch: Path, check: bool) -> dict[str, Found]:
    """Measure the longest gap of streams that a long prompt joins, and its first token."""
    tokens, count = (500, 2) if check else (JOINER_TOKENS, LATER_JOINS + 1)
    with _server(scratch) as (port, _):
        each = [asyncio.run(_join(port, 100 * number, tokens)) for number in range(count)]
    gaps, firsts = zip(*each, strict=True)
    return {
        f"longest gap of {STREAMS} streams joined by {tokens} tokens": _found(gaps),
        f"first token of {tokens} tokens that join": _found(firsts),
    }


async def _join(port: int, seed: int, tokens: int) -> tuple[float, float]:
    async with streams(port, STREAMS, seed + 10) as running:
        await asyncio.sleep(_BEFORE_JOIN_S)
        begun = time.perf_counter()
        joined_s = await first_s_of(port, prompts.text(seed + 1, tokens))
        ended = begun + joined_s
        await asyncio.sleep(_BEFORE_JOIN_S)  # until each stream has its next text
        return max(gaps_s(running, begun, ended)), joined_s


def prefixes(scratch: Path, check: bool) -> dict[str, Found]:
    """Measure first tokens after prefixes on SSD, also after a question."""
    tokens, count = (300, 2) if check else (PREFIX_TOKENS, LATER_PREFIXES + 1)
    with _server(scratch, "--ssd-policy", "write_through") as (port, _):
        for number in range(count):
            first_s(port, number, tokens)
    found = {}
    for name in ("first of all", "after a question"):
        with _server(scratch) as (port, _):
            if name != "first of all":
                first_s(port, 1_000, QUESTION_TOKENS)
            times = [_prefix_s(port, number, tokens) for number in range(count)]
            in_ram = statistics.median(_prefix_s(port, n, tokens) for n in range(count))
        found[f"prefix of {tokens} tokens on SSD, {name}"] = _found(times)
        found[f"the same in RAM, {name}"] = Found(in_ram, 0.0)
    return found


def _prefix_s(port: int, number: int, tokens: int) -> float:
    prompt = f"{prompts.text(number, tokens)} {prompts.text(time.monotonic_ns(), TAIL_TOKENS)}"
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0}
    answer = asyncio.run(_stream(port, "/completions", body))
    if answer.cached_tokens < tokens // 2:
        sys.exit(f"{answer.cached_tokens} of {tokens} tokens were found")
    return answer.total_s


async def _stream(port: int, path: str, body: dict[str, Any]) -> StreamedAnswer:
    with closing(ApiClient(f"http://127.0.0.1:{port}")) as client:
        answer = await client.stream(path, body)
    if answer.error not in (None, "no token"):
        sys.exit(f"a request failed: {answer.error} {answer.detail}")
    return answer


def _found(times: Sequence[float]) -> Found:
    return Found(times[0], statistics.median(times[1:]))


@contextmanager
def _server(scratch: Path, *flags: str, cache: Path | None = None) -> Iterator[tuple[int, float]]:
    """Run a server, with ``cache`` as the user's; yield its port and the seconds that it took to
    start. The cache has the model, and what earlier servers have left there, also of compiled
    modules."""
    environment = dict(os.environ)
    if cache is not None:
        models = cache / user_cache().name / "models"
        if not models.exists():
            models.parent.mkdir(parents=True)
            models.symlink_to(resolve(MODEL).parent)
        environment["XDG_CACHE_HOME"] = str(cache)
        environment["PYTHONPYCACHEPREFIX"] = str(cache / "modules")
    command = [sys.executable, "-m", "mlx_lm_server", "--model", MODEL, "--host", "127.0.0.1"]
    command += ["--ssd-cache-dir", str(scratch / "ssd"), *FLAGS, *flags]
    begun = time.perf_counter()
    with running(command, "/readyz", environment) as (port, _):
        yield port, time.perf_counter() - begun


CASES = {"questions": questions, "joins": joins, "prefixes": prefixes}
