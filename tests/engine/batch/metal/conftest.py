"""Kernels that run in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.batch.metal import calls, kernel, trial
from engine.batch.metal.kernel import Source
from tests.engine.batch.metal.emulate import COMPILER, Emulated


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> Path:
    """The folder of compiled kernels, which later runs find again."""
    folder: Path = request.config.cache.mkdir("kernels")
    return folder


@pytest.fixture
def emulated(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Emulated]]:
    """Put the emulator in the place of Metal. Returns the kernels that were used, by name."""
    if COMPILER is None:
        pytest.skip("the emulator of kernels needs g++")
    used: dict[str, Emulated] = {}

    def make(source: Source) -> Emulated:
        return used.setdefault(source.name, Emulated(source, built))

    monkeypatch.setattr(kernel, "make", make)
    monkeypatch.setattr(kernel, "why_not", lambda: "")
    monkeypatch.setattr(trial, "CHECKED_TOKENS", (1, 15, 16, 17, 150))
    calls._kernel.cache_clear()
    yield used
    calls._kernel.cache_clear()
