"""How a router exits: with its server, or with another router taking over its connections."""

from __future__ import annotations

import asyncio
import logging
import signal

import uvicorn

from router.fleet.router import Router
from router.http.connections import Connection
from shared.supervisor_link import SERVER_ENDS

LINGER_S = 0.5
"""How long a connection may be idle before it is closed: its client may be about to use it."""
FIRST_REQUEST_S = 5.0
"""The same for a new connection: its client has a request to send."""
logger = logging.getLogger("router")


class RouterEnd:
    """Stops ``server`` once, on the event loop; a second call stops it immediately."""

    def __init__(self, server: uvicorn.Server, router: Router, *, is_supervised: bool) -> None:
        self._server = server
        self._router = router
        self._task: asyncio.Task[None] | None = None
        self._is_handing_over = False
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.drain)
        if is_supervised:
            loop.add_signal_handler(SERVER_ENDS, self.drain)
            loop.add_signal_handler(signal.SIGTERM, self.hand_over)
        else:
            loop.add_signal_handler(signal.SIGTERM, self.drain)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def at_once(self) -> None:
        self._router.abort_all("The server is shutting down.")
        self._server.should_exit = self._server.force_exit = True

    def drain(self) -> None:
        """Finish running requests, refuse new ones, and exit: there will be no other router."""
        if self._is_handing_over:
            self._is_handing_over = False
            self._router.draining = True
        elif self._task is not None:
            self.at_once()
        else:
            logger.info("draining")
            self._task = asyncio.create_task(self._drain())

    def hand_over(self) -> None:
        """Finish running requests, and exit. New connections wait in the supervisor's socket for
        the next router."""
        if self._task is not None:
            self.at_once()
        else:
            logger.info("exiting; new connections wait for the next router")
            self._is_handing_over = True
            self._router.ending.set()
            self._task = asyncio.create_task(self._hand_over())

    async def _drain(self) -> None:
        settings = self._router.settings
        await self._router.drain(settings.drain_timeout_s, settings.pre_stop_delay_s)
        self._server.should_exit = True

    async def _hand_over(self) -> None:
        server, state = self._server, self._server.server_state
        while not server.started:
            await asyncio.sleep(0.05)
        for listening in server.servers:
            listening.close()
        server.config.encoded_headers.append((b"connection", b"close"))
        await server.on_tick(0)  # which sets the headers of all answers, as each later tick does
        await asyncio.sleep(0.1)  # the connections accepted last are known by then
        loop = asyncio.get_running_loop()
        now = loop.time()
        late_at, quiet_since = now + self._router.settings.drain_timeout_s, now
        while state.connections and now < late_at:
            has_new = any(isinstance(one, Connection) and one.is_new for one in state.connections)
            if now > quiet_since + (FIRST_REQUEST_S if has_new else LINGER_S):
                break
            await asyncio.sleep(0.05)
            now = loop.time()
            if state.tasks:
                quiet_since = now
        if state.tasks:
            self._router.abort_all("The router was restarted before the answer was complete.")
        server.should_exit = True
