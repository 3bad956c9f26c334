"""Server-sent events: a running generation as a stream of chunks."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import Send

from router.answers import AnswerWriter
from router.errors import ApiError, ClientGone, InternalError
from router.generation import Generation

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0


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
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s
        self._written_at = time.monotonic()

    async def run(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends everything, headers first. Errors end it as an event; raises `ClientGone`."""
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
            await self._run()
        except ApiError as error:
            await self._end(self._writer.error(error))
        except ClientGone:
            raise
        except Exception:
            logger.exception("in the stream of %s", self._writer.id)
            await self._end(self._writer.error(InternalError()))

    async def _run(self) -> None:
        generation, writer = self._generation, self._writer
        events = [writer.opening(generation)]
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
            events.clear()
            if error is not None:
                raise error
            if generation.finished:
                break
            # A call is shown as a whole: tokens may come for long without anything to write.
            silent_s = time.monotonic() - self._written_at
            if silent_s >= self._keep_alive_s or not await generation.news(
                self._keep_alive_s - silent_s
            ):
                await self._write(writer.keep_alive)
        await self._end(writer.closing(generation))

    async def _end(self, body: bytes) -> None:
        await self._write(body, more=False)

    async def _write(self, body: bytes, more: bool = True) -> None:
        self._written_at = time.monotonic()
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            logger.info("%s: the client does not read", self._writer.id)
            raise ClientGone from None
