"""`mlx-lm-server bench serve`: load on any server with OpenAI's API, and what its clients see."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from rich.progress import Progress

from services.commands.bench.options import ServeOptions, read_options
from services.commands.bench.plot import PlotFailed, check_plot, plot
from services.commands.bench.report import LoadReport, text_of
from services.commands.progress import LoadBar, progress_shown
from services.measuring.client import ApiClient
from services.measuring.load import (
    Loader,
    Recorder,
    closed_loop,
    limited,
    open_loop,
    until,
)
from services.measuring.measures import Level, level_of
from services.measuring.workloads import Asking, Conversation, TokenRange, conversations
from shared.exits import EXIT_FAILED, EXIT_OK, EXIT_USAGE, fail
from shared.version import installed_version

PROG = "mlx-lm-server bench serve"
EXIT_NO_SERVER = 3
EXIT_INTERRUPTED = 128 + signal.SIGINT
WARM_UP = TokenRange(16, 16)
LEVEL_SEEDS = 1000
"""The distance of the seeds of two levels: their prompts differ."""


def main(argv: Sequence[str]) -> int:
    """Measure, and print tables or JSON; return the exit code."""
    options = read_options(argv)
    try:
        if options.plot is not None:
            check_plot(options.plot)
    except PlotFailed as error:
        return fail(PROG, error, EXIT_USAGE)
    try:
        report, interrupted = asyncio.run(_measure(options))
    except (OSError, ValueError) as error:
        return fail(PROG, f"--url {options.url}: {error}", EXIT_NO_SERVER)
    except KeyboardInterrupt:  # before anything was measured
        return EXIT_INTERRUPTED
    try:
        sys.stdout.write(report.encode().decode() if options.json else text_of(report) + "\n")
        if options.save is not None:
            options.save.write_bytes(report.encode())
        if options.plot is not None and any(level.completed for level in report.levels):
            plot([report], options.plot)
    except (OSError, PlotFailed) as error:
        return fail(PROG, error, EXIT_FAILED)
    if interrupted:
        return EXIT_INTERRUPTED
    failed = any(level.errors for level in report.levels)
    return EXIT_FAILED if failed else EXIT_OK


async def _measure(options: ServeOptions) -> tuple[LoadReport, bool]:
    """Return the report, and whether it was interrupted. Raises OSError and ValueError if there is
    no server."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    client = ApiClient(options.url, options.api_key, options.timeout_s)
    levels: list[Level] = []
    try:
        model = await _checked_model(client, options.model)
        asking = Asking(options.endpoint, model, options.fields())
        for caught in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(caught, stop.set)
        await until(stop, _warm_up(options, client, asking))
        with progress_shown() as progress:
            for number, load in enumerate(options.loads()):
                if stop.is_set():
                    break
                run = _LevelRun(options, Loader(client, asking, Recorder()), number, load)
                levels.append(await run.measure(progress, stop))
    finally:
        client.close()
    report = LoadReport(
        url=options.url,
        model=model,
        label=options.label or model,
        endpoint=options.endpoint,
        workload=options.shape.name,
        options=options.said(),
        seed=options.seed,
        started=started,
        version=installed_version(),
        levels=levels,
    )
    return report, stop.is_set()


async def _checked_model(client: ApiClient, given: str) -> str:
    """Return the model ``given``, or the server's first. Raises OSError if there is no server, and
    ValueError if it names no model."""
    try:
        models = await client.models()
    except ValueError:
        if given:  # some servers have no list
            return given
        raise
    if not given and not models:
        raise ValueError("the server names no model; --model does")
    return given or models[0]


async def _warm_up(options: ServeOptions, client: ApiClient, asking: Asking) -> None:
    shape = options.shape._replace(
        name="fixed", input_tokens=WARM_UP, output_tokens=WARM_UP, turns=1
    )
    warm = Loader(client, asking, Recorder())
    given = conversations(shape, options.seed - 1)
    for _ in range(options.warm_up):
        await warm.hold(next(given))


class _LevelRun:
    """The measurement of one level of load."""

    def __init__(
        self, options: ServeOptions, loader: Loader, number: int, load: int | float
    ) -> None:
        self._options, self._loader, self._load = options, loader, load
        self._seed = options.seed + LEVEL_SEEDS * number
        self._count = options.count(load)

    async def measure(self, progress: Progress, stop: asyncio.Event) -> Level:
        options, recorder = self._options, self._loader.recorder
        is_open = options.request_rate is not None
        title = f"{self._load:g} requests/s" if is_open else f"{self._load:g} clients"
        per_conversation = 2 if options.shape.name == "long-join" else options.shape.turns
        total = None if self._count is None else self._count * per_conversation
        recorder.on_record = LoadBar(progress, title, total).add
        began = time.perf_counter()
        await until(stop, self._work())
        return level_of(
            recorder.records,
            recorder.joins,
            concurrency=None if is_open else int(self._load),
            request_rate=self._load if is_open else None,
            cancelled=recorder.cancelled,
            duration_s=time.perf_counter() - began,
            limits=options.goodput,
        )

    def _work(self) -> Awaitable[None]:
        options, load = self._options, self._load
        ends_s = math.inf if options.duration_s is None else time.monotonic() + options.duration_s
        given = limited(conversations(options.shape, self._seed), self._count, ends_s)
        if options.shape.name == "long-join":
            return self._joins(given)
        hold = replace(self._loader, ends_s=ends_s).hold
        if options.request_rate is None:
            return closed_loop(given, int(load), hold)
        rng = random.Random(self._seed)
        return open_loop(given, load, options.burstiness, rng, hold, ends_s)

    async def _joins(self, given: Iterator[Conversation]) -> None:
        for number, _ in enumerate(given):
            await self._loader.join(self._options.shape, int(self._load), self._seed + 2 * number)
