"""What the router learns from the supervisor of models that are pulled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.fleet.models.supervised import RemoteJob, Supervised


class Channel:
    def __init__(self) -> None:
        self.told: list[dict[str, object]] = []

    def send(self, **message: object) -> bool:
        self.told.append(message)
        return True


def job(state: str, number: int, reason: str = "") -> dict[str, Any]:
    return {"me/b": {"kind": "pull", "number": number, "state": state, "reason": reason}}


@pytest.mark.parametrize("known", ["running", "cancelled"])
def test_whoever_pulls_just_after_a_cancelled_download_is_told_of_the_next(known: str) -> None:
    supervised = Supervised(Channel())
    supervised.on_models({"models": {}, "jobs": job(known, 1)})

    async def follow() -> list[RemoteJob]:
        async def tell() -> None:
            for state, number in (("cancelled", 1), ("running", 2), ("done", 2)):
                await asyncio.sleep(0.15)
                supervised.on_models({"models": {}, "jobs": job(state, number)})

        telling = asyncio.create_task(tell())
        found = [each async for each in supervised.follow_job("pull", "me/b")]
        await telling
        return found

    found = asyncio.run(follow())
    assert (found[-1].state, found[-1].number) == ("done", 2)
    assert all(each.state != "cancelled" for each in found)
