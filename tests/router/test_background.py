"""Tasks beside the requests: how they fail, and how they end."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest

from router.fleet import background
from router.fleet.background import BackgroundTasks
from router.fleet.router import Router
from shared.settings import Settings

SLOW_S = 0.4


async def fail() -> None:
    raise RuntimeError("broken")


def test_a_failed_task_is_logged_and_a_router_still_stops_completely(
    socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    async def last() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            done.append("last task")

    def close_badly() -> None:
        raise OSError("no disk")

    async def run() -> None:
        router = Router(Settings(), [f"ipc://{socket_dir}/engines"], "test")
        router.background += [fail, last]
        router.closers += [close_badly, lambda: done.append("last closer")]
        await router.start()
        await asyncio.sleep(0.05)
        assert "fail failed" in caplog.text and "broken" in caplog.text
        await router.stop()

    asyncio.run(run())
    assert done == ["last task", "last closer"]
    assert "no disk" in caplog.text
    assert not (socket_dir / "engines").exists()


def test_what_the_supervisor_says_at_the_end_does_no_harm(socket_dir: Path) -> None:
    """Its messages come on another thread, when the sockets may be closed already."""

    async def run() -> None:
        router = Router(Settings(), [f"ipc://{socket_dir}/engines"], "test")
        await router.start()
        await router.stop()
        router.on_supervisor_message({"ended": "engine-0"})

    asyncio.run(run())


def test_tasks_end_together_and_those_that_do_not_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(SLOW_S)

    async def endless() -> None:
        while True:
            try:
                await asyncio.sleep(3 * SLOW_S)
                return
            except asyncio.CancelledError:
                continue

    async def stop() -> float:
        tasks = BackgroundTasks()
        tasks.start(*(slow() for _ in range(4)), endless())
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        await tasks.stop()
        return time.monotonic() - begin

    monkeypatch.setattr(background, "_END_WITHIN_S", 2 * SLOW_S)
    with caplog.at_level(logging.ERROR):
        assert SLOW_S <= asyncio.run(asyncio.wait_for(stop(), 10)) < 3.5 * SLOW_S
    assert [record.getMessage() for record in caplog.records] == [
        "test_tasks_end_together_and_those_that_do_not_are_named.<locals>.endless did not end "
        f"within {2 * SLOW_S:g} s"
    ]
