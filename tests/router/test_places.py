"""Who gets the next place."""

from __future__ import annotations

import asyncio

from router.places import Places
from tests.conftest import in_loop


def test_keys_share_places_however_many_lines_each_has() -> None:
    async def run() -> list[str]:
        places, order = Places(4), list[str]()

        async def line(key: str) -> None:
            await places.take(key)
            order.append(key)
            await asyncio.sleep(0)
            places.give_back(key)

        many = [asyncio.create_task(line("many")) for _ in range(40)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(line("few")) for _ in range(3)]
        await asyncio.gather(*many, *few)
        assert not places.taken
        return order

    order = asyncio.run(run())
    assert len(order) == 43
    assert [place for place, key in enumerate(order) if key == "few"][-1] < 14


@in_loop
async def test_a_waiter_that_leaves_takes_no_place() -> None:
    places = Places(1)
    await places.take("a")
    leaving = asyncio.create_task(places.take("b"))
    waiting = asyncio.create_task(places.take("c"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    places.give_back("a")
    await asyncio.wait_for(waiting, 5)
    places.give_back("c")
    taken = asyncio.create_task(places.take("d"))
    await asyncio.sleep(0)
    taken.cancel()  # it has its place already: that is its own to give back
    await asyncio.gather(taken, return_exceptions=True)
