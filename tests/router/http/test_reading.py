"""Connections that send bodies take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.http.reading import _AT_ONCE, TurnFlow
from tests.conftest import in_loop


class Pipe(asyncio.Transport):
    """A connection that always has data: it pauses after each piece, as uvicorn does."""

    def __init__(self, on_read: Callable[[Pipe], None]) -> None:
        super().__init__()
        self._on_read = on_read
        self.is_closed = False
        self.flow = TurnFlow(self, asyncio.get_running_loop())

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        assert not self.is_closed
        self._on_read(self)

    def is_closing(self) -> bool:
        return self.is_closed


@in_loop
async def test_few_connections_read_in_one_round_of_the_loop_each_in_its_turn() -> None:
    rounds: list[list[Pipe]] = [[]]
    pipes = [Pipe(lambda pipe: rounds[-1].append(pipe)) for _ in range(3 * _AT_ONCE)]
    for _ in range(2):
        for pipe in pipes:
            pipe.flow.pause_reading()
            pipe.flow.resume_reading()
            pipe.flow.resume_reading()  # asked for twice, it has one turn
        assert not rounds[-1]
        while any(pipe.flow.read_paused for pipe in pipes):
            await asyncio.sleep(0)
            rounds.append([])
    read = [found for found in rounds if found]
    assert [len(found) for found in read] == [_AT_ONCE] * 6
    assert [pipe for found in read for pipe in found] == pipes * 2


@in_loop
async def test_a_connection_that_closes_before_its_turn_is_left_alone() -> None:
    read: list[Pipe] = []
    closed, other = Pipe(read.append), Pipe(read.append)
    for pipe in (closed, other):
        pipe.flow.yield_reading()
    closed.is_closed = True
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert read == [other]
