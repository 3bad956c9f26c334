"""`python -m bench step`: executor steps alone, by batch size and token count."""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bench.executor_steps import chunk_s, decode_s
from engine.backend import allocation
from engine.backend.blas import load_fast_blas
from engine.model.errors import ModelUnavailable
from services.commands.admin_client import add_json_flag, table
from services.commands.bench.options import count, counts
from services.commands.parser import CommandParser
from services.commands.progress import progress_shown
from shared import settings
from shared.exits import EXIT_CONFIG, EXIT_OK, fail
from shared.settings import Settings

if TYPE_CHECKING:  # these import mlx
    from engine.executor.base import Executor

PROG = "python -m bench step"


def main(argv: Sequence[str]) -> int:
    """Measure in a process started like an engine; return its exit code."""
    if added := allocation.environment(os.environ):  # as engines do; it is read at the start
        command = [sys.executable, "-m", "bench.engine.step", *argv]
        os.execve(sys.executable, command, {**os.environ, **added})
    return measure(argv)


def measure(argv: Sequence[str]) -> int:
    """Print the duration of steps; return the exit code."""
    options, flags = make_parser().parse_known_args(argv)
    server = settings.parse(flags, os.environ, PROG, one_model=True)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        executor, context = _executor(server)
    except ModelUnavailable as error:
        return fail(PROG, error, EXIT_CONFIG)
    rows, chunks = _measured(options, executor, context)
    title = f"{server.model}, batching: {executor.spec.batching}; medians of {options.runs}"
    found = {"model": server.model, "batching": executor.spec.batching, "runs": options.runs}
    if options.json:
        text = json.dumps({**found, "decode": rows, "prefill": chunks})
    else:
        text = f"{title}\n\ndecode steps\n{_decode_table(rows)}\n\nchunks\n{_chunk_table(chunks)}"
    sys.stdout.write(f"{text}\n")
    return EXIT_OK


def _decode_table(rows: Sequence[dict[str, Any]]) -> str:
    shown: list[list[object]] = [["ROWS", "CONTEXT", "MS PER STEP", "MS PER TOKEN", "TOK/S"]]
    for each in rows:
        ms, count = 1000 * each["seconds"], each["rows"]
        rate = f"{1000 * count / ms:.1f}"
        shown.append([count, each["context"], f"{ms:.1f}", f"{ms / count:.1f}", rate])
    return table(shown)


def _chunk_table(chunks: Sequence[dict[str, Any]]) -> str:
    shown: list[list[object]] = [["TOKENS", "AFTER", "MS PER CHUNK", "TOK/S"]]
    for each in chunks:
        ms, count = 1000 * each["seconds"], each["tokens"]
        shown.append([count, each["start"], f"{ms:.1f}", f"{1000 * count / ms:.1f}"])
    return table(shown)


def _executor(server: Settings) -> tuple[Executor, int]:
    """Return the executor that serves with these settings, and the model's context."""
    load_fast_blas()
    from engine import device
    from engine.replica.build import build_replica
    from services.processes.engine import load_model

    device.prepare()
    replica = build_replica(load_model(server), server)
    return replica.executor, replica.scheduler.config.context_length


def _measured(
    options: argparse.Namespace, executor: Executor, context: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    most = executor.spec.max_sequences or max(options.rows)
    rows = [
        {"rows": rows, "context": length}
        for length in options.context
        for rows in options.rows
        if rows <= most and length + options.steps + 16 <= context
    ]
    chunks = [
        {"tokens": tokens, "start": start}
        for tokens in options.chunks
        for start in options.after
        if start + tokens <= context
    ]
    work = [(row, _decode) for row in rows] + [(chunk, _chunk) for chunk in chunks]
    with progress_shown() as progress, suppress(KeyboardInterrupt):
        for each, time_it in progress.track(work, description="steps"):
            times = [time_it(executor, each, options.steps) for _ in range(options.runs)]
            each["seconds"] = statistics.median(times)
    return [row for row in rows if "seconds" in row], [
        chunk for chunk in chunks if "seconds" in chunk
    ]


def _decode(executor: Executor, row: dict[str, Any], steps: int) -> float:
    return decode_s(executor, [row["context"]] * row["rows"], steps, filled=True)


def _chunk(executor: Executor, chunk: dict[str, Any], steps: int) -> float:
    return chunk_s(executor, chunk["start"], chunk["tokens"], filled=True)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=PROG,
        usage="%(prog)s [flags] [flags of `mlx-lm-server serve`, such as --model and --kv-bits]",
        description="Time executor steps alone, without scheduler, sockets and HTTP. Each step "
        "finishes before the next begins.",
        allow_abbrev=False,
    )
    for name, default, what in (
        ("rows", (1, 2, 4, 8, 16), "sequences in a decode step"),
        ("context", (200,), "tokens before it in each sequence"),
        ("chunks", (64, 256), "tokens in a chunk of a prompt"),
        ("after", (0, 1000), "tokens before a chunk"),
    ):
        parser.add_argument(
            f"--{name}",
            type=counts if name != "after" else _places,
            default=default,
            metavar="N[,N...]",
            help=f"{what} (default: {','.join(map(str, default))})",
        )
    parser.add_argument("--steps", type=count, default=16, help="a run (default: %(default)s)")
    parser.add_argument("--runs", type=count, default=3, help="(default: %(default)s)")
    add_json_flag(parser)
    return parser


def _places(text: str) -> tuple[int, ...]:
    return tuple(0 if part == "0" else count(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
