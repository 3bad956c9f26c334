"""The faults of chaos that depend on which process is drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import in_loop
from tests.e2e.chaos.faults import Saboteur


@in_loop
async def test_a_process_that_stands_still_until_it_is_killed_has_a_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.e2e.chaos.faults.HUNG_FOR_S", 0.0)
    stopped: list[str] = []

    def send(role: str, number: int) -> list[int]:
        stopped.append(role)
        return []

    site: Any = SimpleNamespace(
        roles=("second router",), pids=lambda role: [1], send=send, has_small_disk=False
    )
    assert await Saboteur(site, 1, 1.0).stop_until_killed() == "router hung"
    assert stopped == ["router"]
