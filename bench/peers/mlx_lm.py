"""This server beside mlx_lm.server, over HTTP, in turn: streams, prefixes, prompts that join."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench import prompts
from bench.client import checked, complete, complete_all, token_rate
from bench.servers import mlx_lm_server, ours
from bench.side import side
from bench.turns import in_turn, median_ratio
from engine.model.load import resolve
from engine.plan import FEWEST_PAGE_TOKENS
from services.measuring.answers import StreamedAnswer

Ports = tuple[int, int]
_JoinTimes = tuple[float, float, float]
NAMES = ("ours", "mlx_lm.server")
FLAGS = ("--max-batch-size", "16", "--completion-batch-size", "32")
TOKENS = 64
"""Length of answers whose rate is measured."""
STACK_PAIRS = 3
"""Pairs per run of `stack`. Its difference is small compared with the machine's own noise."""


def compare(names: Sequence[str], model: str, runs: int) -> None:
    """Start both servers, and run the `BENCHES` in ``names``."""
    with ExitStack() as stack:
        our_port = stack.enter_context(ours(model, *FLAGS))
        ports = (our_port, stack.enter_context(mlx_lm_server(resolve(model))))
        for port in ports:
            asyncio.run(complete(port, prompts.text(1, 30), 8))
        for name in names:
            print(f"\n## {name}", flush=True)
            if name in OF_OURS:
                OF_OURS[name](model, runs)
            else:
                BENCHES[name](ports, runs)


def throughput(ports: Ports, runs: int) -> None:
    """Tokens per second of 1, 4, 8 and 16 streams, with 128 prompt tokens and 64 output tokens."""
    ratios = []
    print("streams  " + "  ".join(f"{name:>14}" for name in NAMES) + "   ratio")
    for streams in (1, 4, 8, 16):
        rates = in_turn([partial(_rate, port, streams, 0) for port in ports], runs)
        mine, theirs = map(statistics.median, rates)
        ratios.append(median_ratio(*rates))
        print(
            f"{streams:7d}  {mine:8.1f} tok/s  {theirs:8.1f} tok/s   {ratios[-1]:.2f}", flush=True
        )
    print(f"geometric mean of the ratios: {statistics.geometric_mean(ratios):.2f}")


def prefix(ports: Ports, runs: int) -> None:
    """Time to first token with a shared prefix of 1,000 tokens and tails of 32."""
    cold: tuple[list[float], list[float]] = ([], [])
    warm: tuple[list[float], list[float]] = ([], [])
    eight: tuple[list[float], list[float]] = ([], [])
    tail_alone: list[float] = []
    step: list[float] = []
    for run in range(runs):
        for which in _in_turn(run):
            port, head = ports[which], prompts.text(50_000 + run, 1000)
            asks = [f"{head} {prompts.text(run * 10 + i, 28)}" for i in range(3)]
            cold[which].append(_first(port, asks[0]))
            warm[which].append(statistics.median(_first(port, ask) for ask in asks[1:]))
            head = prompts.text(60_000 + run, 1000)
            asks = [f"{head} {prompts.text(run * 10 + i, 28)}" for i in range(8)]
            streams = checked(asyncio.run(complete_all(port, asks, 4)))
            eight[which].append(max(stream.first_s for stream in streams))
            if which == 0:
                alone = asyncio.run(complete(port, prompts.text(70_000 + run, 32), 12))
                tail_alone.append(alone.first_s)
                gaps = [b - a for a, b in zip(alone.times, alone.times[1:], strict=False)]
                step.append(statistics.median(gaps))
    _compare("cold, alone", cold)
    _compare("warm (RAM)", warm)
    _compare("last of 8 with the same new prefix", eight)
    for which, name in enumerate(NAMES):
        times = statistics.median(a / b for a, b in zip(eight[which], cold[which], strict=True))
        print(f"the last of 8 starts after {times:.2f} x the time of one alone: {name}")
    bound = statistics.median(tail_alone) + 3 * statistics.median(step)
    print(f"a 32-token prompt alone plus 3 decode steps: {bound * 1000:.0f} ms")


def join(ports: Ports, runs: int) -> None:
    """A 2,000-token prompt joins 4 running streams."""
    print(f"{'':14}  longest gap of a stream   first token of the joiner   alone    ratio")
    times: tuple[list[_JoinTimes], list[_JoinTimes]] = ([], [])
    for run in range(max(1, runs // 2)):
        for which in _in_turn(run):
            alone = _first(ports[which], prompts.text(80_000 + run, 2000))
            streams, joiner = asyncio.run(_join(ports[which], 90_000 + run))
            gap = max(stream.longest_gap_s for stream in streams)
            times[which].append((gap, joiner.first_s, alone))
    for name, found in zip(NAMES, times, strict=True):
        gap, first, alone = map(statistics.median, zip(*found, strict=True))
        print(f"{name:14}  {gap:17.2f} s  {first:24.2f} s  {alone:9.2f} s  {first / alone:.2f}")


async def _join(port: int, seed: int) -> tuple[list[StreamedAnswer], StreamedAnswer]:
    tasks = [asyncio.create_task(complete(port, prompts.text(seed + i, 40), 300)) for i in range(4)]
    await asyncio.sleep(2.0)
    joiner = await complete(port, prompts.text(seed + 9, 2000), 8)
    return [await task for task in tasks], joiner


def ssd(model: str, runs: int) -> None:
    """Time to first token with a 1,000-token prefix from the SSD, after a full restart."""
    ram, disk = [], []
    for run in range(max(1, runs // 2)):
        asks = [f"{prompts.text(95_000 + run, 1000)} {prompts.text(i, 28)}" for i in range(4)]
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            directory = Path(name)
            with ours(model, "--ssd-policy", "write_through", ssd=directory) as port:
                _first(port, asks[0])
                ram.append(statistics.median(_first(port, ask) for ask in asks[1:3]))
                while len(list(directory.rglob("*.safetensors"))) < 1000 // FEWEST_PAGE_TOKENS:
                    time.sleep(0.2)
            with ours(model, "--ssd-policy", "write_through", ssd=directory) as port:
                asyncio.run(complete(port, prompts.text(1, 30), 8))
                disk.append(_first(port, asks[3]))
    _compare("from the SSD after a restart", (disk, ram), "from RAM")


def connects(ports: Ports, runs: int) -> None:
    """Connect 64 clients at the same moment: errors, and times to first tokens."""
    for which, name in enumerate(NAMES):
        texts = [prompts.text(100_000 + i, 8) for i in range(64)]
        streams = asyncio.run(complete_all(ports[which], texts, 4))
        errors = [stream.error for stream in streams if stream.error]
        starts = [stream.first_s for stream in streams if not stream.error]
        after = f"{min(starts):.2f} to {max(starts):.2f} s" if starts else "no time"
        print(f"{name:14} {len(errors)} errors; first tokens after {after} {errors[:1] or ''}")


def stack(model: str, runs: int) -> None:
    """The cost of HTTP, router and wire: this server against its executor in-process, both without
    drafts."""
    with ours(model, *FLAGS, "--spec-decode", "none") as port, side("ours", model) as driver:
        for streams in (1, 8):
            measures = (
                partial(_rate, port, streams, 110_000),
                lambda run, n=streams: driver.call("rate", _texts(n, 110_000, run), TOKENS),
            )
            rates = in_turn(measures, STACK_PAIRS * runs)
            print(f"{streams} streams: the serving stack costs {1 - median_ratio(*rates):.1%}")


BENCHES: dict[str, Callable[[Ports, int], None]] = {
    "throughput": throughput,
    "prefix": prefix,
    "join": join,
    "connects": connects,
}
OF_OURS: dict[str, Callable[[str, int], None]] = {"ssd": ssd, "stack": stack}
"""Comparisons with servers of their own."""


def _in_turn(run: int) -> tuple[int, int]:
    return (0, 1) if run % 2 == 0 else (1, 0)


def _texts(streams: int, first: int, run: int) -> list[str]:
    return [prompts.text(first + 1000 * streams + 100 * run + i, 128) for i in range(streams)]


def _rate(port: int, streams: int, first: int, run: int) -> float:
    return token_rate(asyncio.run(complete_all(port, _texts(streams, first, run), TOKENS)))


def _first(port: int, prompt: str) -> float:
    (answer,) = checked([asyncio.run(complete(port, prompt, 2))])
    return answer.first_s


def _compare(
    what: str, times: tuple[list[float], list[float]], other: str = "mlx_lm.server"
) -> None:
    mine, theirs = map(statistics.median, times)
    ratio = median_ratio(*times)
    print(f"{what}: {mine * 1000:.0f} ms, {other} {theirs * 1000:.0f} ms, ratio {ratio:.2f}")
