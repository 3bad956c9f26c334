"""Starts the compared servers, and stops them with their child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from engine.backend.blas import load_fast_blas
from shared.network.ports import free_ports

START_TIMEOUT_S = 180.0
CONTEXT_TOKENS = 1024
_END_WITH_STDIN = (
    "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"
)


@contextmanager
def ours(model: str, *flags: str, ssd: Path | None = None) -> Iterator[int]:
    """Run all processes of this server, with ``ssd`` or a new directory; yield its port."""
    command = [sys.executable, "-m", "mlx_lm_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--kv-bits", "16"]  # as mlx_lm.server
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as cache,
        running([*command, "--ssd-cache-dir", str(ssd or cache), *flags], "/readyz") as (port, _),
    ):
        yield port


def kill_engine(server: int) -> None:
    """Kill the first engine of the server with the process id ``server``."""
    found = subprocess.run(
        ["pgrep", "-P", str(server), "-f", "processes.engine"],
        capture_output=True,
        text=True,
    )
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)


@contextmanager
def mlx_lm_server(model: Path, *flags: str) -> Iterator[int]:
    """Run mlx-lm's server on the same weights and the same fast BLAS; yield its port."""
    environment = dict(os.environ)
    blas = load_fast_blas()
    if blas:
        environment["LD_PRELOAD"] = blas
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
    command += ["--log-level", "ERROR", *flags]
    with running(command, "/v1/models", environment) as (port, _):
        yield port


@contextmanager
def mlx_vlm_server(python: str, *flags: str) -> Iterator[int]:
    """Run mlx-vlm's server in the environment of ``python``, with the same fast BLAS; yield its
    port."""
    environment = dict(os.environ)
    if blas := load_fast_blas():
        environment["LD_PRELOAD"] = blas
    command = [python, "-m", "mlx_vlm.server", "--host", "127.0.0.1", *flags]
    with running(command, "/health", environment) as (port, _):
        yield port


@contextmanager
def llama_server(
    program: str, gguf: Path, streams: int, threads: int, context: int = CONTEXT_TOKENS, *flags: str
) -> Iterator[int]:
    """Run llama.cpp's server for ``streams`` streams of ``context`` tokens; yield its port."""
    command = [program, "--model", str(gguf), "--host", "127.0.0.1", "--no-webui"]
    command += ["--parallel", str(streams), "--ctx-size", str(streams * context)]
    command += ["--threads", str(threads), "--threads-batch", str(threads), *flags]
    with running(command, "/health") as (port, _):
        yield port


@contextmanager
def running(
    command: Sequence[str],
    probe: str,
    environment: dict[str, str] | None = None,
    log: IO[bytes] | None = None,
) -> Iterator[tuple[int, int]]:
    """Run a server until it answers at the path ``probe``; yield its port and its process id.

    Its output is shown on failure, and kept in ``log``."""
    (port,) = free_ports(1)
    with tempfile.TemporaryFile() as scratch:
        written = log or scratch
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=written,
            stderr=written,
            env=environment,
            start_new_session=True,
        )
        try:
            with ended_with_us(process):
                _wait(process, f"http://127.0.0.1:{port}{probe}")
                yield port, process.pid
        except BaseException:
            written.seek(0)
            sys.stderr.write(written.read().decode(errors="replace")[-4000:])
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Make ``process``, a session of its own, end with its children if this process is killed
    meanwhile.

    Another process waits for the end of a pipe that only this process has open."""
    command = [sys.executable, "-c", _END_WITH_STDIN, str(process.pid)]
    watching = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert watching.stdin is not None
    try:
        yield
    finally:
        watching.kill()
        watching.stdin.close()
        watching.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"no answer at {url} within {START_TIMEOUT_S:g} s")
