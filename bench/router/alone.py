"""The router alone, with fake engines, beside a bare Starlette application.

Both stream the same bytes to the same clients at the same rate, in turn. The difference is the
router's cost per token: the wire, detokenizing, stop strings, parsing, JSON, limits, metrics."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.router.clients import Streams, events_of
from bench.servers import START_TIMEOUT_S, ended_with_us, running
from engine.model.load import resolve
from shared.descriptors import raise_descriptor_limit

NUM_EVENTS = 100
"""Number of events of the router that the bare application repeats."""


@dataclass(frozen=True)
class Load:
    """The load on the router."""

    streams: int = 1000
    engines: int = 50
    models: int = 20
    rate: float = 20.0
    """Tokens per second of each stream."""
    seconds: float = 15.0
    """Duration of each measurement."""
    settle_s: float = 2.0
    """Time after the last stream has begun in which nothing is measured."""


@dataclass
class Measured:
    """The result of one server for an interval."""

    tokens: int
    events: int
    """Events that arrived in that time: fewer if several tokens came at once."""
    cpu_s: float
    seconds: float
    memory_mb: float
    gaps_s: list[float]

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.cpu_s / self.tokens

    def line(self, name: str) -> str:
        usual, most = statistics.quantiles(self.gaps_s, n=100)[98], max(self.gaps_s)
        return (
            f"{name:15} {self.tokens / self.seconds:8.0f} tok/s in {self.events / self.tokens:4.0%}"
            f" as many events  {self.us_per_token:6.1f} us of CPU a token  "
            f"{self.cpu_s / self.seconds:5.0%} of a core  {self.memory_mb:6.0f} MB  times between"
            f" events: 99 of 100 within {1e3 * usual:.0f} ms, all within {1e3 * most:.0f} ms"
        )


def router(model: str, runs: int) -> None:
    """CPU time a token of 1,000 streams at 20 tokens/s, with 50 engines of 20 models."""
    measure(resolve(model), Load(), runs)


def measure(directory: Path, load: Load, runs: int) -> list[tuple[Measured, Measured]]:
    """Print and return what router and bare application took, in ``runs`` alternating runs."""
    raise_descriptor_limit()
    found: list[tuple[Measured, Measured]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as private, ExitStack() as stack:
        port, pid = stack.enter_context(running_router(Path(private), directory, load))
        events = Path(private) / "events.json"
        events.write_text(json.dumps(_some_events(port, load)))
        command = [sys.executable, "-m", "bench.router.bare", str(events), f"--rate={load.rate}"]
        bare_port, bare_pid = stack.enter_context(running(command, "/readyz"))
        for run in range(runs):
            pair = {}
            for name in ("router", "bare Starlette")[:: 1 if run % 2 == 0 else -1]:
                server = (port, pid) if name == "router" else (bare_port, bare_pid)
                pair[name] = measured(*server, load)
                print(pair[name].line(name), flush=True)
            found.append((pair["router"], pair["bare Starlette"]))
        stalls = _metric(port, "event_loop_lag_max_seconds")
    ratios = [ours.us_per_token / theirs.us_per_token for ours, theirs in found]
    print(f"CPU a token: {statistics.median(ratios):.2f} times the bare application's (median of")
    print(f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}); the router's event loop stood still")
    print(f"for {1e3 * stalls:.0f} ms at most in the last minute")
    return found


@contextmanager
def running_router(private: Path, directory: Path, load: Load) -> Iterator[tuple[int, int]]:
    """Run a router with its engines until every model is ready; yield its port and its pid."""
    address = f"ipc://{private}/engines"
    command = [
        sys.executable,
        "-m",
        "services.processes.router",
        "--host=127.0.0.1",
        "--log-level=error",
    ]
    command += [f"--engine-socket={address}", "--max-concurrent-requests=0"]
    command += [f"--max-queue-size={load.streams}"]
    engines = [sys.executable, "-m", "bench.router.engines", address, str(directory)]
    engines += [f"--engines={load.engines}", f"--models={load.models}", f"--rate={load.rate}"]
    with running(command, "/livez") as (port, pid):
        process = subprocess.Popen(engines, start_new_session=True)
        try:
            with ended_with_us(process):
                _wait_until_ready(port, load)
                yield port, pid
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_ready(port: int, load: Load) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        models = json.loads(_get(port, "/v1/models"))["data"]
        if sum(model["ready_replicas"] for model in models) == load.engines:
            return
        time.sleep(0.2)
    raise RuntimeError(f"not all engines were ready within {START_TIMEOUT_S:g} s")


def measured(port: int, pid: int, load: Load) -> Measured:
    streams = Streams(port, load.models)
    try:
        streams.open(load.streams)
        streams.read(load.settle_s)
        cpu_s, tokens = cpu_s_of(pid), _generated(port)
        events = streams.read(load.seconds)
        cpu_s, tokens = cpu_s_of(pid) - cpu_s, _generated(port) - tokens
        memory_mb, gaps_s = _memory_mb(pid), list(streams.gaps_s)
        return Measured(tokens or events, events, cpu_s, load.seconds, memory_mb, gaps_s)
    finally:
        streams.close()


def _some_events(port: int, load: Load) -> list[str]:
    streams = Streams(port, load.models)
    try:
        streams.open(1)
        while len(events := events_of(bytes(streams.first))) < NUM_EVENTS:
            streams.read(0.2)
        return events[:NUM_EVENTS]
    finally:
        streams.close()


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process so far, of all its threads."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    # On a Mac, with hundredths: [[days-]hours:]minutes:seconds
    seconds = 0.0
    for part in re.split("[-:]", _ps("time", pid)):
        seconds = 60 * seconds + float(part)
    return seconds


def _memory_mb(pid: int) -> float:
    return int(_ps("rss", pid)) / 1024


def _ps(column: str, pid: int) -> str:
    listing = ["ps", "-o", f"{column}=", "-p", str(pid)]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout.strip()


def _generated(port: int) -> int:
    """Return how many tokens the router has received; 0 for the bare application."""
    try:
        return int(_metric(port, 'key_generated_tokens_total{key=""}'))
    except urllib.error.HTTPError:
        return 0


def _metric(port: int, name: str) -> float:
    text, name = _get(port, "/metrics"), re.escape(f"mlx_lm_server_{name}")
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found is not None else 0.0


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        text: str = answer.read().decode()
        return text
