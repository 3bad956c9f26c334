"""`mlx-lm-server doctor`: what is found on this machine, and what is missing."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq

from services.listener import ListenError, listen
from shared import settings
from shared.exits import EXIT_FAILED, EXIT_OK
from shared.rundir import RunDir, RunDirError
from shared.settings import Settings

PROG = "mlx-lm-server doctor"
_PACKAGES = ("mlx-lm-server", "mlx", "mlx-lm", "pyzmq", "msgspec", "starlette", "uvicorn")
_GB = 1e9


class Check(NamedTuple):
    """One line of the report."""

    name: str
    text: str
    passed: bool | None = None  # None: information only


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report for a server with these flags; return 0 if it could start."""
    argv = sys.argv[1:] if argv is None else argv
    options = settings.parse(argv, os.environ, PROG)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    healthy = True
    for name, text, passed in examine(options):
        mark = {True: "ok  ", False: "BAD ", None: "    "}[passed]
        sys.stdout.write(f"{mark}{name:<14}{text}\n")
        healthy = healthy and passed is not False
    return EXIT_OK if healthy else EXIT_FAILED


def examine(options: Settings) -> Iterator[Check]:
    """Yield the lines of the report, in order."""
    yield Check("python", f"{platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        yield _package(package)
    yield from _device()
    yield _http(options)
    yield _sockets()
    yield from _disk(options)


def _package(name: str) -> Check:
    try:
        return Check(name, importlib.metadata.version(name), True)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "not installed", None if name == "mlx-lm-server" else False)


def _device() -> Iterator[Check]:
    from engine.backend.blas import load_fast_blas  # before anything imports mlx

    library = load_fast_blas()
    try:
        import mlx.core as mx

        total = float(mx.array([1.0, 2.0]).sum().item())
    except Exception as error:  # a broken installation may raise anything, and that is the result
        yield Check("device", f"mlx does not work: {error}", False)
        return
    yield Check("device", str(mx.default_device()), total == 3.0)
    if mx.default_device() == mx.cpu and sys.platform == "linux":
        text = library or "none found: install the extra 'cpu', or Debian's libopenblas0-pthread"
        yield Check("fast BLAS", text, library is not None)


def _http(options: Settings) -> Check:
    try:
        listen(options.host, options.port).close()
    except ListenError as error:
        return Check("http", str(error), False)
    return Check("http", f"{options.host}:{options.port} is free", True)


def _sockets() -> Check:
    try:
        with RunDir.create() as run_dir, zmq.Context() as context:
            with context.socket(zmq.ROUTER) as probe:
                probe.bind(run_dir.socket("doctor"))
            return Check("sockets", f"in {run_dir.path.parent}", True)
    except (RunDirError, zmq.ZMQError) as error:
        return Check("sockets", str(error), False)


def _disk(options: Settings) -> Iterator[Check]:
    from huggingface_hub.constants import HF_HUB_CACHE

    yield _folder("model cache", Path(HF_HUB_CACHE))
    if not options.no_ssd:
        yield _folder("SSD cache", options.ssd_cache_dir)


def _folder(name: str, path: Path) -> Check:
    existing = next(one for one in (path, *path.parents) if one.exists())
    free = shutil.disk_usage(existing).free / _GB
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    text = f"{path} ({free:.1f} GB free{'' if writable else ', not writable'})"
    return Check(name, text, writable)
