"""Work for clients runs on a few threads, fairly between keys."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

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


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


@in_loop
async def test_results_and_errors_come_back() -> None:
    pool = WorkPool()
    assert await pool.run("a", lambda: 5, 1) == 5
    with pytest.raises(ZeroDivisionError):
        await pool.run("a", lambda: 1 // 0, LARGE)
    pool.close()


@in_loop
async def test_the_loop_goes_on_while_work_runs() -> None:
    pool, gate = WorkPool(), Gate()
    running = pool.start("a", gate, LARGE)
    await until(gate.begun)
    gate.end.set()
    await running
    pool.close()


@in_loop
async def test_a_small_job_does_not_wait_for_large_ones() -> None:
    pool, gate = WorkPool(2), Gate()
    large = [pool.start("greedy", gate, LARGE) for _ in range(10)]
    await until(gate.begun)
    assert await pool.run("greedy", lambda: "small", 10) == "small"
    gate.end.set()
    await asyncio.gather(*large)
    pool.close()


@in_loop
async def test_large_jobs_leave_the_interpreter_alone_for_two_thirds_of_the_time() -> None:
    pool, order, began = WorkPool(2), list[str](), time.monotonic()
    await asyncio.gather(*(pool.start("a", job(order, "a", 0.02), LARGE) for _ in range(6)))
    assert time.monotonic() - began >= (6 + 5 * REST_FACTOR) * 0.02
    pool.close()


@in_loop
async def test_keys_take_turns_by_what_their_jobs_cost() -> None:
    """One key's jobs take four times as long as the other's, which gets four for each of them."""
    pool, gate = WorkPool(1), Gate()
    order: list[str] = []
    first = pool.start("first", gate, 10)
    await until(gate.begun)
    jobs = [pool.start("slow", job(order, "slow", 0.04), 10) for _ in range(20)]
    jobs += [pool.start("quick", job(order, "quick", 0.01), 10) for _ in range(20)]
    gate.end.set()
    await asyncio.gather(first, *jobs)
    pool.close()
    assert 3 <= order[: order.index("quick") + 25].count("slow") <= 8, order


@in_loop
async def test_a_key_cannot_save_up_turns() -> None:
    pool, gate = WorkPool(1), Gate()
    await pool.run("busy", lambda: spend(0.3), 10)
    order: list[str] = []
    first = pool.start("busy", gate, 10)
    await until(gate.begun)
    jobs = [pool.start("new", job(order, "new", 0.02), 10) for _ in range(6)]
    jobs += [pool.start("busy", job(order, "busy", 0.02), 10) for _ in range(6)]
    gate.end.set()
    await asyncio.gather(first, *jobs)
    pool.close()
    assert order[:6].count("new") <= 4, order


@in_loop
async def test_a_full_queue_refuses_the_key_that_filled_it() -> None:
    refusals: list[int] = []
    gate = Gate()
    pool = WorkPool(1, max_waiting=5, max_waiting_of_key=3, on_refused=lambda: refusals.append(1))
    jobs = [pool.start("a", gate, 10)]
    await until(gate.begun)
    jobs += [pool.start("a", lambda: None, 10) for _ in range(3)]
    with pytest.raises(TooManyRequests) as refused:
        pool.start("a", lambda: None, 10)
    assert refused.value.headers()["retry-after"]
    jobs += [pool.start("b", lambda: None, 10) for _ in range(2)]
    with pytest.raises(Unavailable):
        pool.start("b", lambda: None, 10)
    assert len(refusals) == 2
    gate.end.set()
    await asyncio.gather(*jobs)
    assert pool.num_waiting == 0
    pool.close()


@pytest.mark.parametrize("max_waiting", [2, 9])  # of all keys
@in_loop
async def test_a_cancelled_job_is_not_begun_and_gives_its_place_back(max_waiting: int) -> None:
    pool, gate = WorkPool(1, max_waiting=max_waiting, max_waiting_of_key=2), Gate()
    running = pool.start("a", gate, 10)
    await until(gate.begun)
    ran: list[int] = []
    waiting = [pool.start("b", lambda: ran.append(1), 10) for _ in range(2)]
    for each in waiting:
        each.cancel()
    await asyncio.sleep(0)
    third = pool.start("b", lambda: None, 10)  # it was full
    gate.end.set()
    await asyncio.gather(running, third)
    assert ran == []
    pool.close()


@in_loop
async def test_a_job_that_is_not_done_by_its_deadline_fails() -> None:
    pool, gate = WorkPool(1, deadline_s=0.1), Gate()
    running = pool.start("a", gate, 10)
    waiting = pool.start("b", lambda: None, 10)
    for each in (running, waiting):
        with pytest.raises(Unavailable) as failure:
            await each
        assert failure.value.code == "server_busy"
    gate.end.set()
    pool.close()
