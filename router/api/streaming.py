"""A running generation as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from starlette.types import Send

from router.api.body import send_body
from router.api.writer import OutputWriter
from router.errors import ApiError, ClientDisconnected, InternalError
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0
OPENING_S = 8.0
"""How long a request waits before its stream is begun without an answer. Until then an error has
its own status; many proxies and clients give up after 10 to 60 s of silence."""


class _RestartableTimer:
    """Calls ``on_expiry`` once ``delay_s`` have passed since the last `start`.

    Every token restarts it, so this must be cheap: it uses one timer of the event loop, which
    checks the deadline when it fires.
    """

    def __init__(self, delay_s: float, on_expiry: Callable[[], None]) -> None:
        self._delay_s = delay_s
        self._on_expiry = on_expiry
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.expired = False

    def start(self, now: float) -> None:
        """Start at time ``now`` of the event loop."""
        self.expired = False
        self._deadline = now + self._delay_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check)

    def stop(self) -> None:
        self._deadline = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check)
        else:
            self._deadline, self.expired = None, True
            self._on_expiry()


class StreamOpening:
    """The first part of a stream, while its request waits for a model, for images or for an engine.

    After `OPENING_S` it sends the headers and keeps the connection alive. An error from then on is
    sent as the last event, and still raised.
    """

    def __init__(
        self,
        writer: OutputWriter,
        send: Send,
        run_large: Callable[[Callable[[], bytes], int], Awaitable[bytes]],
        *,
        request_bytes: int,
        write_timeout_s: float,
        wait_s: float = OPENING_S,
    ) -> None:
        self.writer, self.send, self.write_timeout_s = writer, send, write_timeout_s
        self.request_bytes = request_bytes
        self.has_events = False
        """Whether `OutputWriter.opening` was sent."""
        self._run_large = run_large
        self._wait_s = wait_s
        self._has_headers = self._handed_over = False
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StreamOpening:
        self._task = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._handed_over:
            return
        await self._stop()
        if not self._has_headers or isinstance(error, ClientDisconnected):
            return
        if isinstance(error, Exception):
            shown = error if isinstance(error, ApiError) else InternalError()
            await send_body(self.send, self.writer.error(shown), more=False)

    async def hand_over(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the headers, if that was not done, and stop. Raises `ClientDisconnected`."""
        await self._stop()
        self._handed_over = True
        if not self._has_headers:
            await self._send_headers(headers)

    async def _stop(self) -> None:
        assert self._task is not None
        try:
            # A part that is being sent must arrive whole, unless the client does not read.
            async with asyncio.timeout(self.write_timeout_s), self._sending:
                self._task.cancel()
        except TimeoutError:
            self._task.cancel()
            raise ClientDisconnected from None
        with suppress(asyncio.CancelledError):
            await self._task

    async def _keep_alive(self) -> None:
        await asyncio.sleep(self._wait_s)
        async with self._sending:
            size = self.request_bytes if self.writer.repeats_request else 0
            try:
                events = await self._run_large(self.writer.opening, size)
            except ApiError:
                return  # all threads are busy: the headers come with the answer
            await self._send_headers(())
            await send_body(self.send, events + self.writer.keep_alive)
            self.has_events = True
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            async with self._sending:
                await send_body(self.send, self.writer.keep_alive)

    async def _send_headers(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._has_headers = True
        await self.send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", self.writer.stream_type),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *headers,
                ],
            }
        )


class EventStream:
    """Writes one generation to one client.

    A client that does not read delays only its own stream: at most ``max_tokens`` token ids are
    queued for it, and the stream is aborted after ``write_timeout_s``.
    """

    def __init__(
        self,
        generation: Generation,
        opening: StreamOpening,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._request_bytes = opening.request_bytes
        self._generation = generation
        self._opening = opening
        self._writer = opening.writer
        self._send = opening.send
        self._loop = asyncio.get_running_loop()
        self._write_timeout = asyncio.timeout(None)
        self._write_timer = _RestartableTimer(opening.write_timeout_s, self._abort)
        self._keep_alive_timer = _RestartableTimer(keep_alive_s, generation.notify)

    async def run(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the ``headers``, if the stream has none yet, and all events. An error is sent as the
        last event.

        Raises `ClientDisconnected`.
        """
        try:
            async with self._write_timeout:
                await self._run(headers)
        except TimeoutError:
            logger.info("%s: aborted, the client does not read", self._writer.id)
            raise ClientDisconnected from None
        finally:
            self._write_timer.close()
            self._keep_alive_timer.close()

    async def _run(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._opening.hand_over(headers)
        try:
            await self._send_events()
        except ApiError as error:
            await self._write_error(error)
        except ClientDisconnected:
            raise
        except Exception:
            logger.exception("error while streaming %s", self._writer.id)
            await self._write_error(InternalError())

    async def _write_error(self, error: ApiError) -> None:
        self._generation.stream_error = error
        event = b""
        with suppress(ApiError):  # all threads are busy: the stream ends without an error event
            event = await self._repeat(partial(self._writer.error, error))
        await self._write(event, more=False)

    async def _send_events(self) -> None:
        generation, writer = self._generation, self._writer
        events = []
        if not self._opening.has_events:
            events.append(await self._repeat(writer.opening))
        events.append(await self._repeat(partial(writer.stream_start, generation)))
        unfinished = list(generation.choices)
        self._keep_alive_timer.start(self._loop.time())
        while True:
            error: ApiError | None = None
            await generation.begin_echoes()
            for choice in list(unfinished):
                try:
                    delta = await generation.advance(choice)
                except ApiError as raised:
                    error = raised
                    break
                if delta.tokens:
                    events.append(await self._format(choice, delta))
                elif delta:
                    events.append(writer.delta(generation, choice, delta))
                if choice.finish_reason is not None:
                    end = partial(writer.choice_end, generation, choice)
                    events.append(await self._repeat(end))
                    unfinished.remove(choice)
            if body := b"".join(events):
                await self._write(body)
            # Tokens may arrive for a long time without an event: some tool calls are sent only when
            # complete.
            elif self._keep_alive_timer.expired:
                await self._write(writer.keep_alive)
            events.clear()
            if error is not None:
                raise error
            if not unfinished:
                break
            await generation.changed()
        last = await self._repeat(partial(writer.stream_end, generation))
        await self._write(last, more=False)

    async def _repeat(self, write: Callable[[], bytes]) -> bytes:
        """Return the events of ``write``, which may repeat the request and the answer so far."""
        size = 0
        if self._writer.repeats_request:
            size = self._request_bytes + self._generation.answer_size
        return await self._generation.run_large(write, size)

    async def _format(self, choice: Choice, delta: OutputDelta) -> bytes:
        generation, writer = self._generation, self._writer
        entries = len(delta.tokens or ()) * (1 + generation.logprobs_context.num_logprobs)
        return await generation.format(lambda: writer.delta(generation, choice, delta), entries)

    async def _write(self, body: bytes, more: bool = True) -> None:
        now = self._loop.time()
        self._write_timer.start(now)
        await send_body(self._send, body, more)
        self._write_timer.stop()
        self._keep_alive_timer.start(now)

    def _abort(self) -> None:
        self._write_timeout.reschedule(0)
