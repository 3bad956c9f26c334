"""`/page/feed`: the state of the server once per second, as server-sent events, for the page.

One sampler serves all viewers, and runs only while there are any; each event is encoded once. A
slow viewer gets the newest state when it has read the last one: nothing is queued for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.endpoints import cancel_on_disconnect
from router.api.operations import Operation
from router.api.sse import encode_event
from router.errors import ClientDisconnected, SiteForbidden, TooManyRequests, Unavailable
from router.fair_shares import FairShares
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.http.status.figures import Point
from router.http.status.sampler import StatusSampler
from router.waiting import wait_at_most

MAX_VIEWERS = 32
HISTORY_SAMPLES = 300
EVERY_S = 1.0
WRITE_TIMEOUT_S = 30.0
"""A viewer that reads nothing for this long is disconnected."""

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}

logger = logging.getLogger(__name__)


class StatusFeed:
    """An ASGI application. Each viewer gets the ``history``, then ``status`` events."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._history: deque[Point] = deque(maxlen=HISTORY_SAMPLES)
        self._sampler = StatusSampler(router)
        self._viewers: set[asyncio.Event] = set()
        """Each is set when there is a new event, or when there will be none."""
        self._places = FairShares()
        self._task: asyncio.Task[None] | None = None
        self._sampled_at = 0.0
        self._event = b""

    @property
    def operation(self) -> Operation:
        has_key = self._router.settings.metrics_key is not None
        return Operation(
            "/page/feed",
            self,
            "State of the server once per second",
            "Server",
            access="metrics key" if has_key else "key",
            media_type="text/event-stream",
            errors=(TooManyRequests, Unavailable),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Browsers send a GET without asking. Such a page could read nothing, but occupy all slots.
        if not _may_watch(Headers(scope=scope), self._router.settings.cors_origin):
            raise SiteForbidden("Pages of other sites cannot read the feed: see --cors-origin.")
        if scope["method"] == "HEAD":  # a response without an end would block its connection
            await Response(headers=_HEADERS)(scope, receive, send)
            return
        with self._viewer(scope["state"]["tenant"]) as changed:
            async with cancel_on_disconnect(receive):
                await self._show(changed, send)

    @contextmanager
    def _viewer(self, tenant: Tenant) -> Iterator[asyncio.Event]:
        """Count a viewer; the first one starts the sampler, and the last one stops it."""
        if self._router.ending.is_set():
            raise Unavailable("The server is shutting down.", code="shutting_down")
        if not self._places.has_room(tenant.share, MAX_VIEWERS, alone=tenant.alone):
            is_of_key = len(self._viewers) < MAX_VIEWERS
            raise TooManyRequests(
                f"The limit of {MAX_VIEWERS} viewers is reached"
                f"{f' for this {tenant.noun}' if is_of_key else ''}.",
                code="too_many_viewers",
                retry_after_s=10,
            )
        changed = asyncio.Event()
        self._viewers.add(changed)
        self._places.take(tenant.share)
        if self._task is None:
            self._task = asyncio.create_task(self._sample())
        try:
            yield changed
        finally:
            self._viewers.remove(changed)
            self._places.give_back(tenant.share)
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _show(self, changed: asyncio.Event, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if time.monotonic() - self._sampled_at > EVERY_S:
            await changed.wait()  # the first sample
        changed.clear()
        history = encode_event(msgspec.json.encode([*self._history]), "history")
        await _write(send, history + self._event)
        while not self._router.ending.is_set():
            await changed.wait()
            changed.clear()
            await _write(send, self._event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _sample(self) -> None:
        """Sample until the last viewer leaves or the server stops."""
        ending = self._router.ending
        while not ending.is_set():
            wait_s = self._sampled_at + EVERY_S - time.monotonic()
            await wait_at_most(ending, max(0.0, wait_s))
            try:
                status = self._sampler.sample(len(self._viewers))
                self._history.append(status.now)
                self._event = encode_event(msgspec.json.encode(status), "status")
            except Exception:
                logger.exception("the status page's sample")
            self._sampled_at = time.monotonic()
            for changed in self._viewers:
                changed.set()


async def _write(send: Send, body: bytes) -> None:
    """Send ``body``. Raises `ClientDisconnected` if the viewer reads nothing that was
    sent before."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": True})
    except TimeoutError:
        raise ClientDisconnected from None


def _may_watch(headers: Headers, allowed_origins: Sequence[str]) -> bool:
    """Return whether a request is from a program, the server's own page, or an allowed origin.

    Browsers send `Sec-Fetch-Site` to https and loopback addresses only, and `Origin` with a GET for
    another site that the page wants to read.
    """
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site") != "cross-site"
    own = origin.partition("://")[2] == headers.get("host")
    return own or origin in allowed_origins or "*" in allowed_origins
