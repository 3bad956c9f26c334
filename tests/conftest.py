"""What many tests need. The fast BLAS comes first: it has to be there before MLX is."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.backend.blas import load_fast_blas

load_fast_blas()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of the real test model, converted at its first use on a machine."""
    from engine.model.demo import demo_model_path

    return demo_model_path()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(kind, seed=0)``: the directory of a random model, made once a session."""
    from tests.tiny_models import Kind, make_tiny

    root = tmp_path_factory.mktemp("models")

    def make(kind: Kind, seed: int = 0) -> Path:
        path = root / f"{kind}-{seed}"
        return path if path.exists() else make_tiny(kind, path, seed)

    return make


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory for sockets; short, since their paths may have 103 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="mlms-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def unused_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def free_port() -> int:
    return unused_port()
