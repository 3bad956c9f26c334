"""Server-sent events: a running generation as a stream of chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import Send

from router.api.answers import AnswerWriter
from router.errors import ApiError, ClientGone, InternalError
from router.generation.generation import Generation

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0


class _Alarm:
    """Calls ``ring`` when ``delay_s`` have passed since `start`. To start it again, as every
    token does, costs next to nothing: one timer of the loop serves all the time."""

    def __init__(self, delay_s: float, ring: Callable[[], None]) -> None:
        self._delay_s = delay_s
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.rung = False

    def start(self) -> None:
        self.rung = False
        self._due = self._loop.time() + self._delay_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)

    def stop(self) -> None:
        self._due = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._look)
        else:
            self._due, self.rung = None, True
            self._ring()


class EventStream:
    """Writes one generation to one client.

    A client that does not read holds up the writing alone: its tokens wait as ids, at
    most ``max_tokens`` of them, and after ``write_timeout_s`` it is given up.
    """

    def __init__(
        self,
        generation: Generation,
        writer: AnswerWriter,
        send: Send,
        *,
        write_timeout_s: float,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._generation = generation
        self._writer = writer
        self._send = send
        self._patience = asyncio.timeout(None)
        self._blocked = _Alarm(write_timeout_s, self._give_up)
        self._silent = _Alarm(keep_alive_s, generation.wake)

    async def run(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends everything, headers first. Errors end it as an event; raises `ClientGone`."""
        try:
            async with self._patience:
                await self._run(headers)
        except TimeoutError:
            logger.info("%s: the client does not read", self._writer.id)
            raise ClientGone from None
        finally:
            self._blocked.close()
            self._silent.close()

    async def _run(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *headers,
                ],
            }
        )
        try:
            await self._events()
        except ApiError as error:
            await self._end(self._writer.error(error))
        except ClientGone:
            raise
        except Exception:
            logger.exception("in the stream of %s", self._writer.id)
            await self._end(self._writer.error(InternalError()))

    async def _events(self) -> None:
        generation, writer = self._generation, self._writer
        events = [writer.opening(generation)]
        self._silent.start()
        while True:
            error: ApiError | None = None
            for choice in generation.choices:
                if choice.finish_reason is not None:
                    continue
                try:
                    piece = generation.advance(choice)
                except ApiError as raised:
                    error = raised
                    break
                if piece:
                    events.append(writer.piece(generation, choice, piece))
                if choice.finish_reason is not None:
                    events.append(writer.end(generation, choice))
            if any(events):
                await self._write(b"".join(events))
            elif self._silent.rung:  # a call is shown as a whole: tokens may come for long
                await self._write(writer.keep_alive)
            events.clear()
            if error is not None:
                raise error
            if generation.finished:
                break
            await generation.news()
        await self._end(writer.closing(generation))

    async def _end(self, body: bytes) -> None:
        await self._write(body, more=False)

    async def _write(self, body: bytes, more: bool = True) -> None:
        self._blocked.start()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._blocked.stop()
        self._silent.start()

    def _give_up(self) -> None:
        self._patience.reschedule(0)
