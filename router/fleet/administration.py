"""Administrative operations on running engines and requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import islice

from router.errors import EngineNotFound, RequestCancelled, RequestNotFound
from router.fleet.engines.engine import Engine
from router.fleet.engines.registry import Registry
from router.fleet.models.supervised import Supervised
from router.fleet.queue.dispatch import Dispatcher
from router.fleet.sequences.remote_request import RemoteRequest
from shared.wire import ClearCache, Drain, Message

logger = logging.getLogger(__name__)

RESTART_TIMEOUT_S = 900.0
"""Max time for an engine to finish its requests and load its model again."""
ABSENT_S = 60.0
"""Max time without a sign of it. Its supervisor waits at most 30 s before restarting it, and its
heartbeats begin soon after that."""
_POLL_S = 0.2
_REPORT_S = 2.0
"""Max time for our supervisor to report that it has begun."""


class Administration:
    """Runs on the event loop. ``send`` sends a message to an engine, and returns False
    on failure."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        supervised: Supervised,
        send: Callable[[Engine, Message], bool],
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._supervised = supervised
        self._restarted: list[str] = []
        """The engines of the last restart command to our supervisor."""
        self._restarted_at = float("-inf")
        self._send = send
        self._queue: list[str] = []
        self._task: asyncio.Task[None] | None = None

    def drain(self, name: str, *, undo: bool = False) -> Engine:
        """Stop sending requests to an engine, or ``undo`` that. Its current requests continue.

        Raises `EngineNotFound`.
        """
        engine = self._find(name)
        self._registry.set_drained(engine, not undo)
        return engine

    def restart(self, name: str | None = None) -> list[str]:
        """Restart an engine, or all of them one at a time. Return the names of the engines to be
        restarted.

        The supervisor replaces this server's engines. An engine that joined from elsewhere is told
        to finish its requests and exit, and its own supervisor restarts it. Raises
        `EngineNotFound`.
        """
        engines = self._registry.engines if name is None else [self._find(name)]
        wanted = [each.name for each in engines if each.lost_reason is None]
        own = [each for each in wanted if each in self._supervised.engines]
        if own and self._supervised.restart(name):
            self._restarted, self._restarted_at = own, time.monotonic()
            wanted = [each for each in wanted if each not in own]
        else:
            own = []
        self._queue += [each for each in wanted if each not in self._queue]
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._restart_in_turn())
        return [*own, *self._queue]

    @property
    def restarting(self) -> list[str]:
        """The engines that are restarting or waiting for it."""
        heard = time.monotonic() - self._restarted_at > _REPORT_S
        return [
            *(self._restarted if self._supervised.restarting or not heard else []),
            *self._queue,
        ]

    def clear_caches(self, *, ssd: bool) -> list[str]:
        """Drop the cached prefixes of all engines, also on SSD if ``ssd``. Return their names."""
        engines = [engine for engine in self._registry.engines if engine.lost_reason is None]
        return [each.name for each in engines if self._send(each, ClearCache(ssd=ssd))]

    def requests(self, limit: int) -> list[RemoteRequest]:
        """Return the oldest ``limit`` sequences in flight."""
        return list(islice(self._dispatcher.in_flight, limit))

    def cancel(self, request_id: str) -> int:
        """End an answer, or one choice of it, with an error. Return the number of sequences ended.

        Raises `RequestNotFound`.
        """
        found = [
            request
            for request in self._dispatcher.in_flight
            if request_id in (request.request_id, answer_id(request))
        ]
        if not found:
            raise RequestNotFound(f"No request '{request_id}' is running or queued.")
        for request in found:
            self._dispatcher.fail(request, _cancelled())
        return len(found)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _find(self, name: str) -> Engine:
        for engine in self._registry.engines:
            if engine.name == name:
                return engine
        known = ", ".join(engine.name for engine in self._registry.engines) or "none"
        raise EngineNotFound(f"There is no engine '{name}'; the engines are: {known}.")

    async def _restart_in_turn(self) -> None:
        while self._queue:
            name = self._queue[0]
            try:
                engine = self._find(name)
                trouble = await self._restart_one(engine)
                if trouble is not None:
                    rest = ", ".join(self._queue[1:]) or "none"
                    logger.error("engine %s %s; not restarting: %s", name, trouble, rest)
                    self._queue.clear()
                    return
                logger.info("engine %s was restarted", name)
            except EngineNotFound:
                pass  # it has left in the meantime
            self._queue.pop(0)

    async def _restart_one(self, engine: Engine) -> str | None:
        """Wait until another process has replaced ``engine`` and is ready. Return the reason for
        giving up, or None."""
        incarnation = engine.hello.incarnation
        self._send(engine, Drain())
        began = heard = time.monotonic()
        while (now := time.monotonic()) < began + RESTART_TIMEOUT_S:
            for other in self._registry.engines:
                is_new = other.name == engine.name and other.hello.incarnation != incarnation
                if is_new and other.trouble is None:
                    return None
            if self._registry.hears(engine):
                heard = now
            elif now - heard > ABSENT_S:
                return f"did not come back within {ABSENT_S:.0f} s"
            await asyncio.sleep(_POLL_S)
        return f"was not ready again within {RESTART_TIMEOUT_S:.0f} s"


def answer_id(request: RemoteRequest) -> str:
    """Return the id of the answer to which the sequence belongs."""
    return request.request_id.rpartition(":")[0]


def _cancelled() -> RequestCancelled:
    return RequestCancelled("The request was cancelled by an administrator.")
