"""Work for clients runs on a few threads, fairly between keys."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from router.errors import TooManyRequests, Unavailable
from router.tokens.work_pool import REST_FACTOR, SMALL_SIZE, WorkPool
from tests.conftest import in_loop

LARGE = SMALL_SIZE + 1


def spend(seconds: float) -> None:
    """Use the processor, as work does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def job(order: list[str], key: str, seconds: float) -> Callable[[], None]:
    """Return work that takes ``seconds``, and then adds ``key`` to ``order``."""

    def work() -> None:
        spend(seconds)
        order.append(key)

    return work


class Gate:
    """Work that runs until it is told to end."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.end = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.end.wait(30)

    async def occupy(self, pool: WorkPool, key: str = "a", size: int = 10) -> asyncio.Future[None]:
        """Run on a thread of ``pool``."""
        running = pool.start(key, self, size)
        assert await asyncio.to_thread(self.begun.wait, 30)
        return running


@pytest.fixture
def gate() -> Gate:
    return Gate()


@in_loop
async def test_results_and_errors_come_back() -> None:
    with closing(WorkPool()) as pool:
        assert await pool.run("a", lambda: 5, 1) == 5
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 // 0, LARGE)


@in_loop
async def test_neither_the_loop_nor_a_small_job_waits_for_large_ones(gate: Gate) -> None:
    with closing(WorkPool(2)) as pool:
        large = [await gate.occupy(pool, "greedy", LARGE)]
        large += [pool.start("greedy", gate, LARGE) for _ in range(9)]
        assert await pool.run("greedy", lambda: "small", 10) == "small"
        gate.end.set()
        await asyncio.gather(*large)


@in_loop
async def test_large_jobs_leave_the_interpreter_alone_for_two_thirds_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests, sleep = list[float](), time.sleep

    def rest(seconds: float) -> None:
        rests.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", rest)  # the time that passes says little beside other work
    with closing(WorkPool(2)) as pool:
        await asyncio.gather(*(pool.start("a", job([], "a", 0.02), LARGE) for _ in range(6)))
    assert sum(rests) >= 5 * REST_FACTOR * 0.02


async def order_of(
    pool: WorkPool, gate: Gate, *jobs: tuple[str, float, int], busy: str = "first"
) -> list[str]:
    """Return the keys of jobs in the order in which they end: of each so many, which take so long.
    All wait while ``busy`` has the thread."""
    order: list[str] = []
    running = [await gate.occupy(pool, busy)]
    for key, seconds, count in jobs:
        running += [pool.start(key, job(order, key, seconds), 10) for _ in range(count)]
    gate.end.set()
    await asyncio.gather(*running)
    return order


@in_loop
async def test_keys_take_turns_by_what_their_jobs_cost(gate: Gate) -> None:
    """One key's jobs take four times as long as the other's, which gets four for each of them."""
    with closing(WorkPool(1)) as pool:
        order = await order_of(pool, gate, ("slow", 0.04, 10), ("quick", 0.01, 20))
    assert 3 <= order[: order.index("quick") + 25].count("slow") <= 8, order


@in_loop
async def test_a_key_cannot_save_up_turns(gate: Gate) -> None:
    with closing(WorkPool(1)) as pool:
        await pool.run("busy", lambda: spend(0.3), 10)
        order = await order_of(pool, gate, ("new", 0.02, 6), ("busy", 0.02, 6), busy="busy")
    assert order[:6].count("new") <= 4, order


@in_loop
async def test_a_full_queue_refuses_the_key_that_filled_it(gate: Gate) -> None:
    refusals: list[int] = []
    limits: dict[str, Any] = {"max_waiting": 5, "max_waiting_of_key": 3}
    with closing(WorkPool(1, **limits, on_refused=lambda: refusals.append(1))) as pool:
        jobs = [await gate.occupy(pool)]
        for key, fits, refusal in (("a", 3, TooManyRequests), ("b", 2, Unavailable)):
            jobs += [pool.start(key, lambda: None, 10) for _ in range(fits)]
            with pytest.raises(refusal) as refused:
                pool.start(key, lambda: None, 10)
            assert key == "b" or refused.value.headers()["retry-after"]
        assert len(refusals) == 2
        gate.end.set()
        await asyncio.gather(*jobs)
        assert pool.num_waiting == 0


@pytest.mark.parametrize("max_waiting", [2, 9])  # of all keys
@in_loop
async def test_a_cancelled_job_is_not_run_and_frees_its_place(gate: Gate, max_waiting: int) -> None:
    ran: list[int] = []
    with closing(WorkPool(1, max_waiting=max_waiting, max_waiting_of_key=2)) as pool:
        running = await gate.occupy(pool)
        waiting = [pool.start("b", lambda: ran.append(1), 10) for _ in range(2)]
        for each in waiting:
            each.cancel()
        await asyncio.sleep(0)
        third = pool.start("b", lambda: None, 10)  # it was full
        gate.end.set()
        await asyncio.gather(running, third)
    assert ran == []


@in_loop
async def test_a_job_that_is_not_done_by_its_deadline_fails(gate: Gate) -> None:
    with closing(WorkPool(1, deadline_s=0.1)) as pool:
        for each in (pool.start("a", gate, 10), pool.start("b", lambda: None, 10)):
            with pytest.raises(Unavailable) as failure:
                await each
            assert failure.value.code == "server_busy"
        gate.end.set()


def test_a_key_does_not_have_all_threads_with_large_jobs() -> None:
    async def run() -> str:
        pool, hold = WorkPool(3), threading.Event()
        try:
            large = [pool.start("greedy", lambda: hold.wait(30), 10**6) for _ in range(4)]
            await asyncio.sleep(0.1)
            return await asyncio.wait_for(pool.run("other", lambda: "done", 10**6), 20)
        finally:
            hold.set()
            await asyncio.gather(*large)
            pool.close()

    assert asyncio.run(run()) == "done"
