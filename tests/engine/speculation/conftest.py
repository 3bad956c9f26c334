from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sources take no time, however slow the machine of the test is."""
    monkeypatch.setattr("engine.speculation.speculator.thread_time", lambda: 0.0)
