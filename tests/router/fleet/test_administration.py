"""Restarts of engines from elsewhere, which the router can only ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from router.fleet import administration
from router.fleet.engines.sockets import EngineSockets
from router.fleet.router import Router
from shared.settings import Settings
from tests.router.conftest import until
from tests.router.scripted_engine import make_heartbeat, make_hello

ABSENT_S = 0.3
Act = Callable[[Router], Awaitable[None]]


@pytest.fixture
def roll(monkeypatch: pytest.MonkeyPatch, socket_dir: Path) -> Callable[[Act], None]:
    """Return a function that restarts two engines, of which the first leaves, and acts."""
    monkeypatch.setattr(administration, "ABSENT_S", ABSENT_S)
    monkeypatch.setattr(EngineSockets, "send", lambda *_: True)  # nobody is there to get it

    async def restart_both(act: Act) -> None:
        router = Router(Settings(), [f"ipc://{socket_dir}/engines"], "test")
        for name in ("one", "two"):
            router.registry.on_hello(peer(name), make_hello(name, incarnation=name))
        assert router.administration.restart() == ["one", "two"]
        try:
            await asyncio.sleep(0)  # the first is told to end
            router.registry.on_bye(peer("one"))
            await asyncio.wait_for(act(router), 60)
        finally:
            for part in (router.administration, router.registry, router.engine_sockets):
                part.close()

    return lambda act: asyncio.run(restart_both(act))


def peer(name: str) -> bytes:
    """Return what the router's first socket calls an engine."""
    return b"\0" + name.encode()


def heartbeat(router: Router, phase: str) -> None:
    router.registry.on_heartbeat(peer("again"), make_heartbeat("one", "1", 1, phase=phase))


def test_a_restart_is_given_up_with_a_line_if_an_engine_does_not_come_back(
    roll: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def wait(router: Router) -> None:
        await until(lambda: not router.administration.restarting)

    roll(wait)
    assert "engine one did not come back within 0 s; not restarting: two" in caplog.text


def test_a_restart_waits_for_an_engine_that_loads(roll: Callable[[Act], None]) -> None:
    async def come_back(router: Router) -> None:
        heartbeat(router, "loading")
        await asyncio.sleep(3 * ABSENT_S)
        assert router.administration.restarting == ["one", "two"]
        router.registry.on_hello(peer("again"), make_hello("one", incarnation="1"))
        heartbeat(router, "ready")
        await until(lambda: router.administration.restarting == ["two"])

    roll(come_back)
