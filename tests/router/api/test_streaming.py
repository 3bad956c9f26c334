"""What a stream writes on threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

from starlette.types import Message

from router.api.streaming import EventStream
from router.api.writer import OutputWriter
from router.errors import ApiError, Unavailable
from router.generation.generation import Generation
from router.tokens.work_pool import INLINE_SIZE


class LargeWriter:
    """Of a request that cannot be answered, and that each event repeats."""

    id = "resp_1"
    stream_type = b"text/event-stream"
    repeats_request = True
    error_thread = 0

    def stream_start(self, _: object) -> bytes:
        raise Unavailable("no")

    def error(self, error: ApiError) -> bytes:
        self.error_thread = threading.get_ident()
        return error.message.encode()


class ThreadedGeneration:
    choices = ()

    def __init__(self, refused: int) -> None:
        self.refused = refused
        """How many jobs are done before others are refused."""

    def notify(self) -> None: ...

    async def run_large(self, work: Callable[[], bytes], size: int) -> bytes:
        assert size > INLINE_SIZE
        self.refused -= 1
        if self.refused < 0:
            raise Unavailable("no thread")
        return await asyncio.to_thread(work)


def streamed(threads: int) -> tuple[LargeWriter, list[Message]]:
    writer, sent = LargeWriter(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        generation: Any = ThreadedGeneration(threads)
        stream = EventStream(
            cast(Generation, generation),
            cast(OutputWriter, writer),
            send,
            request_bytes=INLINE_SIZE + 1,
            write_timeout_s=60,
        )
        await stream.run([])

    asyncio.run(run())
    return writer, sent


def test_an_error_that_repeats_a_large_request_is_written_on_a_thread() -> None:
    writer, (_, last) = streamed(threads=2)
    assert last == {"type": "http.response.body", "body": b"no", "more_body": False}
    assert writer.error_thread not in (0, threading.get_ident())


def test_where_no_thread_has_time_the_stream_ends_without_an_event() -> None:
    writer, (_, last) = streamed(threads=1)
    assert last == {"type": "http.response.body", "body": b"", "more_body": False}
    assert not writer.error_thread
