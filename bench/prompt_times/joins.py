"""A long prompt beside others: running streams, a short prompt that comes later, one prefix."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import NamedTuple

from bench import prompts
from bench.prompt_times.measuring import (
    FLAGS,
    Options,
    ask,
    first_s,
    first_s_of,
    gaps_s,
    ms,
    step_s,
    streams,
    texts_in,
)
from bench.servers import ours
from services.measuring.client import ApiClient
from services.measuring.measures import percentile
from shared.settings import Settings

MODEL = "demo-fp32"
STREAMS, JOINER_TOKENS = 4, 4000
FULL_BLOCKS = 1024
SHARES = ("0.5", "0.2")
LONG_TOKENS, SHORT_TOKENS = 7500, 32
ARRIVALS = (0.1, 0.35, 0.6, 0.85)
"""Arrival times, as fractions of the time that the long prompt takes alone."""
CLIENTS, PREFIX_TOKENS, END_TOKENS = 8, 1000, 8
_ALONE_S, _AFTER_S = 3.0, 1.0


class Join(NamedTuple):
    """The effects of one joining prompt."""

    step_s: float  # between the streams' texts before
    gaps_s: list[float]  # and while it was computed
    rate: float  # texts per second meanwhile, as a fraction of those before
    first: float  # its time to the first token, relative to the same length alone


def joins(options: Options) -> None:
    """Print how much a joining prompt slows down 4 streams, and how much they slow it down.

    While the cache grows, prompts also wait for new memory: in a virtual machine whose host
    provides pages late, 2 ms per megabyte. With ``options.full``, it is full from the start."""
    (tokens, *_) = options.lengths or (1000 if options.check else JOINER_TOKENS,)
    known = "streams_share" in {each.name for each in dataclasses.fields(Settings)}
    cases = {share: ("--streams-share", share) for share in SHARES} if known else {"": ()}
    # Steps with drafts take longer and bring more tokens, so gaps in steps would mean little.
    full = ("--num-blocks", str(FULL_BLOCKS)) if options.full else ()
    common = (*FLAGS, "--spec-decode", "none", *full)
    print(
        f"--model {MODEL} {' '.join(common)} --kv-bits 16"
        f"{' --streams-share' if known else ''}: {tokens} tokens join {STREAMS} streams"
    )
    with ExitStack() as stack:
        ports = {
            share: options.start(stack, ours(MODEL, *common, *flags))
            for share, flags in cases.items()
        }
        for port in ports.values() if options.full else ():
            for number in range(FULL_BLOCKS * Settings.block_size // tokens + 1):
                first_s(port, 800_000 + number, tokens)
        found: dict[str, list[Join]] = {share: [] for share in ports}
        for run in range(options.runs):
            for share in ports if run % 2 == 0 else reversed(list(ports)):
                with options.locked():
                    found[share].append(asyncio.run(_join(ports[share], 1000 * run, tokens)))
    print(
        "share   step alone   between tokens: median, 99 %      in steps    "
        "streams' rate   first token to alone"
    )
    for share, each in found.items():
        step = statistics.median(one.step_s for one in each)
        gaps = sorted(gap for one in each for gap in one.gaps_s)
        middle, most = statistics.median(gaps), percentile(gaps, 99)
        rate = statistics.median(one.rate for one in each)
        print(
            f"{share or '-':5}   {ms(step):>10}   {ms(middle):>17}, {ms(most):>9}   "
            f"{middle / step:5.1f}, {most / step:5.1f}   {rate:13.2f}   "
            f"{statistics.median(one.first for one in each):20.2f}",
            flush=True,
        )


async def _join(port: int, seed: int, tokens: int) -> Join:
    alone_s = await first_s_of(port, prompts.text(seed + 1, tokens))
    async with streams(port, STREAMS, seed + 10) as running:
        step, rate = await step_s(running, _ALONE_S)
        begun = time.perf_counter()
        joined_s = await first_s_of(port, prompts.text(seed + 2, tokens))
        ended = begun + joined_s
        await asyncio.sleep(_AFTER_S)  # until each stream has its next text
        meanwhile = texts_in(running, begun, ended) / joined_s
        return Join(step, gaps_s(running, begun, ended), meanwhile / rate, joined_s / alone_s)


def newcomer(options: Options) -> None:
    """Print how long a short prompt waits if it arrives while a long one is computed."""
    (tokens, *_) = options.lengths or (2000 if options.check else LONG_TOKENS,)
    print(f"--model {MODEL} {' '.join(FLAGS)} --kv-bits 16: {SHORT_TOKENS} after {tokens} tokens")
    with ExitStack() as stack:
        port = options.start(stack, ours(MODEL, *FLAGS))
        with options.locked():
            alone_s = statistics.median(first_s(port, 100 + i, SHORT_TOKENS) for i in range(5))
            step = asyncio.run(_step_alone(port))
        with options.locked():
            long_s = first_s(port, 1, tokens)
        waits: list[list[float]] = [[] for _ in ARRIVALS]
        longs = []
        for run in range(options.runs):
            with options.locked():
                firsts, took_s = asyncio.run(_newcomers(port, 1000 * (run + 1), tokens, long_s))
            longs.append(took_s / long_s)
            for found, first in zip(waits, firsts, strict=True):
                found.append(first - alone_s)
    print(
        f"alone: {SHORT_TOKENS} tokens {ms(alone_s)}, {tokens} tokens {ms(long_s)}, "
        f"a decode step {ms(step)}"
    )
    for share, found in zip(ARRIVALS, waits, strict=True):
        wait = statistics.median(found)
        print(
            f"arrives after {share:.0%} of it: first token {ms(wait)} later than alone, "
            f"{wait / step:.1f} steps (at most {ms(max(found))})"
        )
    every = [wait for found in waits for wait in found]
    print(
        f"all arrivals: median {ms(statistics.median(every))}, "
        f"{statistics.median(every) / step:.1f} steps; at most {ms(max(every))}, "
        f"{max(every) / step:.1f} steps; "
        f"the long prompt takes {statistics.median(longs):.2f} x its time alone",
        flush=True,
    )


async def _step_alone(port: int) -> float:
    async with streams(port, 1, 50) as running:
        return (await step_s(running, 1.5))[0]


async def _newcomers(port: int, seed: int, tokens: int, long_s: float) -> tuple[list[float], float]:
    """Return the times to first tokens of prompts that arrive at `ARRIVALS`, and of the long
    one."""
    with closing(ApiClient(f"http://127.0.0.1:{port}")) as client:
        begun = time.perf_counter()
        task = asyncio.create_task(ask(client, prompts.text(seed, tokens)))
        firsts = []
        try:
            for number, share in enumerate(ARRIVALS):
                await asyncio.sleep(max(0.0, begun + share * long_s - time.perf_counter()))
                if task.done():
                    raise RuntimeError("the long prompt was computed before a newcomer came")
                firsts.append(await ask(client, prompts.text(seed + 1 + number, SHORT_TOKENS)))
            return firsts, await task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def shared_prefix(options: Options) -> None:
    """Print when the last of 8 clients with one new prefix has its first token."""
    print(
        f"--model {MODEL} {' '.join(FLAGS)} --kv-bits 16: {CLIENTS} at once with one new prefix "
        f"of {PREFIX_TOKENS} tokens and ends of {END_TOKENS}"
    )
    with ExitStack() as stack:
        port = options.start(stack, ours(MODEL, *FLAGS))
        found = options.in_turn(
            {count: partial(_last_first, port=port, count=count) for count in (1, CLIENTS)}
        )
    one, last = (statistics.median(found[count]) for count in (1, CLIENTS))
    ratio = statistics.median(b / a for a, b in zip(found[1], found[CLIENTS], strict=True))
    print(f"one alone {ms(one)}, the last of {CLIENTS} {ms(last)}: ratio {ratio:.2f}", flush=True)


def _last_first(run: int, port: int, count: int) -> float:
    prefix = prompts.text(50_000 + 10 * run + count, PREFIX_TOKENS)
    asked = [f"{prefix} {prompts.text(i, END_TOKENS)}" for i in range(count)]

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(first_s_of(port, prompt) for prompt in asked))

    return max(asyncio.run(all_of_them()))
