"""Tasks that run beside the requests until the router stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_END_WITHIN_S = 10.0

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """Starts tasks and ends them together. A task that fails is logged when it does, and affects
    no other."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, *coroutines: Coroutine[Any, Any, Any]) -> None:
        for each in coroutines:
            task = asyncio.create_task(each, name=getattr(each, "__qualname__", None))
            task.add_done_callback(_log_failure)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Cancel all tasks, and wait until all have ended, though not forever."""
        for task in self._tasks:
            task.cancel()
        if not self._tasks:
            return
        _, running = await asyncio.wait(self._tasks, timeout=_END_WITHIN_S)
        for task in running:
            logger.error("%s did not end within %g s", task.get_name(), _END_WITHIN_S)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
