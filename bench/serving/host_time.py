"""Where the router and an engine spend their time in Python under load, by function.

py-spy samples the thread that holds the interpreter's lock (it cannot distinguish waiting
threads from computing ones everywhere). Compiled code without the lock, such as a forward pass,
counts in the CPU time of all. Only one layer of the demo model is computed, as in `growth`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.router.alone import cpu_s_of
from bench.servers import running
from bench.serving.growth import COMMAND, counters_of, processes_of
from bench.serving.models import make_short_demo
from engine.model.demo import demo_model_path

PARTS = ("router", "engine")
SECONDS, SAMPLES_A_SECOND = 30, 500
SETTLE_S, BEGIN_WITHIN_S = 2.0, 60.0
SERVER = ("--max-batch-size=32", "--completion-batch-size=32", "--no-ssd", "--kv-bits=16")
LOAD = (
    *("--concurrency=16", "--input-tokens=128", "--output-tokens=128", "--ignore-eos"),
    *("--requests=1000000", "--warm-up=0"),
)
SHOWN = 16
ROOT = Path(__file__).resolve().parents[2]
_FRAME = re.compile(r"(.*) \((.*?)(?::\d+)?\)")
_ENDING = re.compile(r" \(.*?([^/]*?)\)$")
Stacks = Counter[tuple[str, ...]]
"""How often each stack was seen, outermost first; a frame is ``function (file:line)``."""


def profile(model: str, runs: int) -> None:
    """Print the shares of each process by the innermost function of this repository."""
    program = shutil.which("py-spy")
    if program is None:
        sys.exit("there is no py-spy on this machine's PATH: pip install py-spy")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        path = make_short_demo(demo_model_path(quantized=True), folder / "model", 1)
        command = [*COMMAND, *SERVER, f"--model={path}"]
        with running(command, "/readyz") as (port, pid), _load(port):
            _print(program, port, pid, folder)


def _print(program: str, port: int, pid: int, folder: Path) -> None:
    before = counters_of(port)["key_generated_tokens_total"]
    children = processes_of(pid)
    pids = {part: children[part][0] for part in PARTS}
    begun_s = {part: cpu_s_of(pid) for part, pid in pids.items()}
    found = _recorded(program, pids, folder)
    spent_s = {part: cpu_s_of(pid) - begun_s[part] for part, pid in pids.items()}
    tokens = counters_of(port)["key_generated_tokens_total"] - before
    print(f"{tokens / SECONDS:.0f} tok/s to 16 clients, 128 tokens in and 128 out, in {SECONDS} s")
    for part, stacks in found.items():
        total, a_token_us = stacks.total(), 1e6 * spent_s[part] / tokens
        python = total / SECONDS / SAMPLES_A_SECOND
        print(
            f"\n{part}: {spent_s[part] / SECONDS:.1%} of a core, {a_token_us:.0f} microseconds a "
            f"token; the interpreter is held {python:.1%} of the time"
        )
        ordered = sorted(shares(stacks).items(), key=lambda each: -each[1].total())
        for where, inner in ordered[:SHOWN]:
            deepest, most = inner.most_common(1)[0]
            print(f"{inner.total() / total:6.1%}  {where} ({most / total:.1%} {deepest})")


def shares(stacks: Stacks) -> dict[str, Counter[str]]:
    """Return the samples of each innermost function of this repository, such as
    ``router/tokens/detokenizer.py: feed``, by the line that ran, there or elsewhere."""
    found: dict[str, Counter[str]] = {}
    for stack, count in stacks.items():
        own = next(filter(None, map(_own, reversed(stack))), "elsewhere")
        found.setdefault(own, Counter())[_ENDING.sub(r" of \1", stack[-1])] += count
    return found


def _own(frame: str) -> str:
    match = _FRAME.fullmatch(frame)
    if match is None or not match[2].startswith(f"{ROOT}/") or "site-packages" in match[2]:
        return ""
    return f"{match[2].removeprefix(f'{ROOT}/')}: {match[1]}"


def read_stacks(text: str) -> Stacks:
    """Return the stacks that py-spy wrote with ``--format raw``."""
    found: Stacks = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        found[tuple(stack.split(";"))] += int(count)
    return found


def _recorded(program: str, pids: dict[str, int], folder: Path) -> dict[str, Stacks]:
    """Sample the processes, all at the same time."""
    command = [program, "record", "--format=raw", "--full-filenames", "--gil"]
    command += [f"--duration={SECONDS}", f"--rate={SAMPLES_A_SECOND}"]
    started = {
        part: subprocess.Popen(
            [*command, f"--pid={pid}", f"--output={folder / part}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part, pid in pids.items()
    }
    for process in started.values():
        said, _ = process.communicate()
        if process.returncode:
            sys.exit(f"py-spy: {said.strip()}")
    return {part: read_stacks((folder / part).read_text()) for part in started}


@contextmanager
def _load(port: int, flags: Sequence[str] = LOAD) -> Iterator[None]:
    """Let clients send requests to the server at ``port``; start when it answers."""
    command = [*COMMAND[:3], "bench", "serve", f"--url=http://127.0.0.1:{port}", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as load:
        try:
            deadline = time.monotonic() + BEGIN_WITHIN_S
            while not counters_of(port)["key_generated_tokens_total"]:
                if load.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the clients get no answers")
                time.sleep(0.2)
            time.sleep(SETTLE_S)
            yield
        finally:
            load.kill()
