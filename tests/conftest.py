"""Fixtures of many tests. The fast BLAS is loaded first: it must be there before MLX."""

from __future__ import annotations

import asyncio
import gc
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec

import httpx._transports.default as transports
import pytest

from engine.backend.blas import load_fast_blas
from shared.imports.transformers_index import remember_transformers

load_fast_blas()
remember_transformers()
# Servers ignore hang-ups where they were started so, as below nohup; those of tests were not.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# A client of httpx reads all certificates: 40 ms, of which none is for a test.
_new_context = transports.create_ssl_context  # type: ignore[attr-defined]
transports.create_ssl_context = cache(_new_context)  # type: ignore[attr-defined]

WAITING = tuple(f"tests/{name}/" for name in ("agents", "clients", "e2e", "services", "router"))
"""Whose tests start processes, and wait for them more than they compute; those with long files are
first."""
SLOW_TIMEOUT_S = 600
SLOW_UNTIL = 0.6
"""The part of a run in which files with slow tests begin."""
LONGEST = (
    "tests/e2e/chaos/test_chaos.py",
    "tests/zoo/test_zoo.py",
    "tests/e2e/texts/test_demo.py",
    "tests/engine/replica/test_memory.py",
    "tests/e2e/operation/test_rolling.py",
    "tests/e2e/fuzz/test_fuzz.py",
    "tests/e2e/soak/test_soak.py",
    "tests/e2e/abuse/test_abuse.py",
)
"""The files whose slow tests take longest. They begin first, so that none of them is the last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, which workers take one by one, so that some tests wait while others compute,
    and that no worker is left with a long file at the end."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    slow = [
        name
        for name, members in files.items()
        if any(item.get_closest_marker("slow") for item in members)
    ]
    slow.sort(key=lambda name: LONGEST.index(name) if name in LONGEST else len(LONGEST))
    waiting = [
        name for start in WAITING for name in files if name.startswith(start) and name not in slow
    ]
    computing = [name for name in files if name not in {*slow, *waiting}]
    place = {
        name: until * number / len(names)
        for names, until in ((slow, SLOW_UNTIL), (waiting, 1), (computing, 1))
        for number, name in enumerate(names)
    }
    items[:] = [item for name in sorted(files, key=place.__getitem__) for item in files[name]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported: there is none yet."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


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


def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.02)


P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in an event loop of its own, for at most a minute."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run
