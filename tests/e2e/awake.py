"""A clock that stops while this process is suspended, so that limits hold when the machine sleeps
or all programs of a test are stopped for minutes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from functools import cache
from typing import Any

_EVERY_S = 0.1
_MAX_S = 1.0
"""Max time counted per step: a longer one means that the process was suspended."""


class _Clock:
    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_EVERY_S)
            now = time.monotonic()
            self.seconds += min(now - last, _MAX_S)
            last = now


@cache
def _clock() -> _Clock:
    return _Clock()


def awake_s() -> float:
    """Return seconds from some start, without the time in which this process stood still."""
    return _clock().seconds


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``. Raises: TimeoutError if it takes longer than ``seconds`` awake."""
    deadline = awake_s() + seconds
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=1))[0]:
            if awake_s() > deadline:
                raise TimeoutError
        task.result()
    finally:
        task.cancel()
