"""Fixtures of many tests. The fast BLAS is loaded first: it must be there before MLX."""

from __future__ import annotations

import asyncio
import gc
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from engine.backend.blas import load_fast_blas

load_fast_blas()
# Servers ignore hang-ups where they were started so, as below nohup; those of tests were not.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


WAITING = tuple(f"tests/{name}/" for name in ("agents", "clients", "e2e", "services", "router"))
"""Whose tests start processes, and wait for them more than they compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put these first: a worker that waited last would leave the others without work."""
    items.sort(key=lambda item: not item.nodeid.startswith(WAITING))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collections: engines collect whenever they start."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the directory of the real test model, converted at its first use on a machine."""
    from engine.model.demo import demo_model_path

    return demo_model_path()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function ``(kind, seed=0)`` for the directory of a random model, made once each."""
    from tests.tiny_models import Kind, make_tiny

    root = tmp_path_factory.mktemp("models")

    def make(kind: Kind, seed: int = 0) -> Path:
        path = root / f"{kind}-{seed}"
        return path if path.exists() else make_tiny(kind, path, seed)

    return make


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """Yield a private directory for sockets; short, since their paths have at most 103 bytes."""
    path = Path(tempfile.mkdtemp(prefix="mlms-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def unused_port() -> int:
    """Return a TCP port of the loopback address on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def free_port() -> int:
    return unused_port()


P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in an event loop of its own, for at most a minute."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run
