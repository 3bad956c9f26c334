"""Measurements of each pair of servers, in turn. They are kept, and continue where they stopped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.peers.environments import Peer, PeerUnavailable, environment, folder_of, install
from bench.servers import ours, running
from engine.model.demo import demo_gguf
from engine.model.load import resolve
from services.commands.bench.report import LoadReport, read_report
from services.measuring.answers import StreamedAnswer
from services.measuring.client import ApiClient
from shared.paths import python_path

OURS = "mlx-lm-server"
FLAGS = ("--max-batch-size", "16", "--completion-batch-size", "32")
"""Of this server, as llama.cpp's is given 16 slots; the others take 32 and more by default."""
CONCURRENCY = (1, 2, 4, 8, 16)
QUESTIONS = {
    "Which city is the capital of France?": "Paris",
    "What is the capital of France?": "Paris",
    "How many days are there in a week?": "7",
}
"""With a part of the right answer. A small model misses some, with codes of 4 bits not always the
same; a server that computes wrong answers none."""
_CELL_S, _ANSWER_S = 900, 120


class Cell(NamedTuple):
    """One level of one workload. `bench serve` runs at least one conversation for each client."""

    workload: str
    clients: int
    flags: tuple[str, ...]


_MIXED = ("--input-tokens=16:1024", "--output-tokens=16:64", "--requests=12")
_PREFIX = ("--prefix-tokens=600", "--input-tokens=32", "--output-tokens=16", "--requests=8")
_TURNS = ("--turns=3", "--input-tokens=64", "--output-tokens=32", "--requests=12")
_JOIN = ("--join-tokens=1000", "--output-tokens=512", "--requests=1")
CELLS = (
    *(
        Cell(
            "fixed",
            clients,
            ("--input-tokens=128", "--output-tokens=32", f"--requests={max(4, clients)}"),
        )
        for clients in CONCURRENCY
    ),
    Cell("mixed", 8, _MIXED),
    Cell("shared-prefix", 8, _PREFIX),
    Cell("multi-turn", 4, _TURNS),
    Cell("long-join", 4, _JOIN),
    *(Cell("mixed", clients, _MIXED) for clients in (2, 16)),
    *(Cell("shared-prefix", clients, _PREFIX) for clients in (2, 16)),
    *(Cell("multi-turn", clients, _TURNS) for clients in (1, 16)),
    *(Cell("long-join", clients, _JOIN) for clients in (1, 8)),
)
"""In the order of measurement; the position of each determines its prompts."""


class Pair(NamedTuple):
    """The results of both servers in one cell of one run."""

    ours: LoadReport
    theirs: LoadReport


def results_of(peer: Peer) -> Path:
    return folder_of(peer).parent / "results" / peer.name


def file_of(peer: Peer, run: int, cell: Cell, side: str) -> Path:
    return results_of(peer) / f"{run}-{cell.workload}-{cell.clients}-{side}.json"


def measured(peer: Peer) -> dict[Cell, list[Pair]]:
    """Return all measured pairs."""
    found: dict[Cell, list[Pair]] = {}
    for cell in CELLS:
        for run in range(100):
            files = [file_of(peer, run, cell, side) for side in (OURS, peer.name)]
            if all(file.exists() for file in files):
                found.setdefault(cell, []).append(Pair(*map(read_report, files)))
    return found


def measure(peer: Peer, cells: Sequence[Cell], runs: int, ends: float) -> bool:
    """Measure what is missing; start no cell after ``ends`` (of time.monotonic). Return whether
    everything is measured. Raises `PeerUnavailable`, also if the server does not run."""
    missing = [
        (run, cell)
        for run in range(runs)
        for cell in cells
        if not all(file_of(peer, run, cell, side).exists() for side in (OURS, peer.name))
    ]
    if not missing:
        return True
    if time.monotonic() > ends:
        return False
    install(peer)
    results_of(peer).mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        their_port = stack.enter_context(serving(peer))
        ask(peer, their_port)
        our_port = stack.enter_context(ours(peer.reads, *FLAGS, *peer.flags))
        for run, cell in missing:
            if time.monotonic() > ends:
                return False
            sides = [(OURS, our_port), (peer.name, their_port)]
            for name, port in sides if run % 2 == 0 else reversed(sides):
                _measure(
                    file_of(peer, run, cell, name),
                    [
                        *(f"--label={name}", f"--url=http://127.0.0.1:{port}"),
                        *([f"--model={peer.model}"] if peer.model and name != OURS else []),
                    ],
                    run,
                    cell,
                )
    return True


@contextmanager
def serving(peer: Peer) -> Iterator[int]:
    """Run ``peer``; yield its port. Raises `PeerUnavailable` if it does not start."""
    weights = resolve(peer.reads)
    if peer.install is not None:
        weights = demo_gguf(folder_of(peer))
    command = peer.command(folder_of(peer), weights)
    started = False
    log = folder_of(peer) / "server.log"
    with log.open("w+b") as written, TemporaryDirectory(prefix="bench-") as home:
        variables = dict(environment(peer, Path(home)))
        try:
            with running(command, peer.probe, variables, written) as (port, _):
                started = True
                yield port
        except (RuntimeError, OSError) as error:
            if started:
                raise
            lines = [each for each in log.read_text(errors="replace").splitlines() if each.strip()]
            reason = "; ".join(lines[-2:]) or str(error)
            raise PeerUnavailable(f"it does not start: {reason}") from None


def ask(peer: Peer, port: int) -> str:
    """Return the first correct answer of ``peer`` to one of `QUESTIONS`. Raises
    `PeerUnavailable` if there is none."""
    wrong = []
    for question, right in QUESTIONS.items():
        answer = asyncio.run(_answer(peer, port, question))
        if answer.error:
            raise PeerUnavailable(f"it fails: {answer.error}: {answer.detail}")
        if right in answer.text:
            return answer.text
        wrong.append(f"{question!r} with {answer.text!r}")
    raise PeerUnavailable(f"it answers {', '.join(wrong)}")


async def _answer(peer: Peer, port: int, question: str) -> StreamedAnswer:
    with closing(ApiClient(f"http://127.0.0.1:{port}", timeout_s=_ANSWER_S)) as client:
        try:
            model = peer.model or (await client.models())[0]
        except (OSError, ValueError, IndexError) as error:
            return StreamedAnswer(error=type(error).__name__, detail=str(error))
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
        return await client.stream("/chat/completions", body)


def _measure(file: Path, server: list[str], run: int, cell: Cell) -> None:
    """Run `bench serve` on a server identified by flags. No two cells have the same prompts."""
    seed = 10_000 * (run + 1) + 100 * CELLS.index(cell)
    command = [sys.executable, "-m", "mlx_lm_server", "bench", "serve", *server, *cell.flags]
    command += [f"--workload={cell.workload}", f"--concurrency={cell.clients}", f"--seed={seed}"]
    command += [f"--save={file}.part", "--timeout-s=300"]
    print(f"{server[0].removeprefix('--label=')} {cell.workload} {cell.clients}", flush=True)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_CELL_S,
            check=False,  # failed requests are in the report
        )
        Path(f"{file}.part").rename(file)
    except subprocess.TimeoutExpired:
        raise _stopped(server, cell, f"nothing within {_CELL_S} s") from None
    except FileNotFoundError:
        raise _stopped(server, cell, done.stderr.strip().rpartition("\n")[2]) from None


def _stopped(server: list[str], cell: Cell, reason: str) -> Exception:
    where = f"{cell.workload} with {cell.clients} clients: {reason}"
    if server[0] == f"--label={OURS}":
        return RuntimeError(f"this server has no result for {where}")
    return PeerUnavailable(f"it has no result for {where}")
