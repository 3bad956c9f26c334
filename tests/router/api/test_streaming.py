"""Server-sent events, what a stream writes on threads, and clients that leave one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from starlette.types import Message

from router.api.sse import encode_event
from router.api.streaming import EventStream, StreamOpening
from router.errors import ApiError, ClientDisconnected, Unavailable
from router.generation.choice import OutputDelta
from router.tokens.work_pool import INLINE_SIZE
from shared.wire import Abort
from tests.router.conftest import Server, begin, eventually, named_events, ok
from tests.router.scripted_engine import make_refusal

HI = [{"role": "user", "content": "hi"}]


class LargeWriter:
    """Of a request that cannot be answered, and that each event repeats."""

    id = "resp_1"
    stream_type = b"text/event-stream"
    repeats_request = True
    error_thread = 0

    def opening(self) -> bytes:
        raise Unavailable("no")

    def error(self, error: ApiError) -> bytes:
        self.error_thread = threading.get_ident()
        return error.message.encode()


class EndingWriter:
    """Notes which of its events are written on the event loop's thread."""

    id = "resp_1"
    stream_type = b"text/event-stream"

    def __init__(self, repeats: bool) -> None:
        self.repeats_request = repeats
        self.inline: list[bool] = []

    def stream_start(self, *_: object) -> bytes:
        self.inline.append(threading.current_thread() is threading.main_thread())
        return b""

    opening = choice_end = stream_end = stream_start


class ThreadedGeneration:
    choices: Sequence[Any] = ()
    answer_size = 0

    def __init__(self, refused: int) -> None:
        self.refused = refused
        """How many jobs are done before others are refused."""

    def notify(self) -> None: ...

    async def begin_echoes(self) -> None: ...

    async def run_large(self, work: Callable[[], bytes], size: int) -> bytes:
        if size <= INLINE_SIZE:
            return work()
        self.refused -= 1
        if self.refused < 0:
            raise Unavailable("no thread")
        return await asyncio.to_thread(work)


class EndedGeneration(ThreadedGeneration):
    """One whose output comes at once."""

    choices = (SimpleNamespace(finish_reason="stop"),)

    async def advance(self, _: object) -> OutputDelta:
        self.answer_size = INLINE_SIZE + 1
        return OutputDelta()


def run_stream(generation: ThreadedGeneration, writer: Any, request_bytes: int) -> list[Message]:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        opening = StreamOpening(
            writer, send, generation.run_large, request_bytes=request_bytes, write_timeout_s=60
        )
        async with opening:
            await EventStream(cast(Any, generation), opening).run([])

    asyncio.run(run())
    return sent


def streamed(threads: int) -> tuple[LargeWriter, list[Message]]:
    writer = LargeWriter()
    return writer, run_stream(ThreadedGeneration(threads), writer, INLINE_SIZE + 1)


WAITING = (
    ("/v1/chat/completions", {"messages": HI}, ": keep-alive\n\n", "data: [DONE]"),
    ("/v1/completions", {"prompt": "hi"}, ": keep-alive\n\n", "data: [DONE]"),
    ("/v1/messages", {"messages": HI, "max_tokens": 9}, "event: ping", "event: message_stop"),
    ("/v1/responses", {"input": "hi"}, "event: response.created", "event: response.completed"),
    ("/api/chat", {"model": "tiny", "messages": HI}, '{"model":"tiny",', '"done":true'),
)


@pytest.mark.timeout(120)
def test_a_stream_begins_and_stays_alive_before_an_engine_has_accepted(server: Server) -> None:
    full = partial(make_refusal, reason="full", message="full")
    engine = server.join("hello world", refuse=full)
    begun = threading.Semaphore(0)

    def read(path: str, body: dict[str, Any]) -> str:
        text = ""
        with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            for part in answer.iter_text():
                begun.release()
                text += part
        return text

    answers = [begin(read, path, body) for path, body, *_ in WAITING]
    failing = begin(read, "/v1/responses", {"input": "hi", "seed": 77})
    for _ in range(len(WAITING) + 1):
        assert begun.acquire(timeout=30)
    assert not any(answer.done() for answer in answers), "no engine has accepted"
    engine.behaviour.refuse = lambda submit: (
        make_refusal(submit, reason="invalid", message="no") if submit.sampling.seed == 77 else None
    )
    *_, error, failed = named_events(failing.result(60))
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert failed["response"]["error"]["message"] == error["message"]
    for answer, (_, _, first, last) in zip(answers, WAITING, strict=True):
        text = answer.result(60)
        assert text.startswith(first) and last in text[-2000:]
    events = named_events(answers[3].result())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    types = [event["type"] for event in events]
    assert types.count("response.created") == 1 and types.count("response.in_progress") > 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_reports_how_much_of_its_prompt_is_computed(server: Server, path: str) -> None:
    engine = server.join("hello world", hold_tokens_after=0, cached_tokens=2)
    engine.behaviour.computed_prompt_tokens = 3
    text = "a rather long question " * 8
    body = {
        "messages": [{"role": "user", "content": text}],
        "prompt": text,
        "return_progress": True,
    }
    found: list[dict[str, Any]] = []

    def progress_in(lines: Iterator[str]) -> Iterator[int]:
        for line in lines:
            if "prompt_progress" in line:
                found.append(json.loads(line.removeprefix("data: ")))
                yield found[-1]["prompt_progress"]["processed"]

    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        seen = progress_in(answer.iter_lines())
        assert next(seen) == 3
        engine.behaviour.computed_prompt_tokens = 7
        assert next(seen) == 7
        engine.behaviour.hold_tokens_after = None
        (total,) = seen
    reports = [each["prompt_progress"] for each in found]
    assert {(each["total"], each["cache"]) for each in reports} == {(total, 2)}
    times = [each["time_ms"] for each in reports]
    assert 0 <= times[0] <= times[1] <= times[2] < 30_000
    empty: dict[str, Any] = {"text": ""} if path == "/v1/completions" else {"delta": {}}
    nothing = {"index": 0, "logprobs": None, "finish_reason": None, **empty}
    assert all(each["choices"] == [nothing] for each in found)
    for other in ({"stream": True, "return_progress": False}, {"stream": False}):
        assert "prompt_progress" not in ok(server.post(path, **body | other)).text


def test_a_request_whose_client_reads_nothing_is_given_up() -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)
        await asyncio.Event().wait()

    async def run() -> None:
        writer, generation = EndingWriter(repeats=False), EndedGeneration(9)
        opening = StreamOpening(
            cast(Any, writer),
            send,
            generation.run_large,
            request_bytes=10,
            write_timeout_s=0.05,
            wait_s=0,
        )
        with pytest.raises(ClientDisconnected):
            async with opening:
                await asyncio.sleep(0.05)
                await EventStream(cast(Any, generation), opening).run([])

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(sent) == 1


EVERY_BREAK = "a\r\nb\vc\fd\x1ce\x1df\x1eg\x85h\u2028i\u2029j \u200b\u0385"


def test_no_text_breaks_an_event_for_clients_that_split_at_any_line_break() -> None:
    sent = encode_event(msgspec.json.encode({"text": EVERY_BREAK}), "delta").decode()
    assert sent.endswith("\n\n")
    name, data, end = sent.splitlines()
    assert (name, end) == ("event: delta", "")
    assert json.loads(data.removeprefix("data: ")) == {"text": EVERY_BREAK}


def test_other_text_is_sent_unchanged() -> None:
    assert encode_event("{é😀 \u200b}".encode()) == "data: {é😀 \u200b}\n\n".encode()


def test_an_error_that_repeats_a_large_request_is_written_on_a_thread() -> None:
    writer, (_, last) = streamed(threads=2)
    assert last == {"type": "http.response.body", "body": b"no", "more_body": False}
    assert writer.error_thread not in (0, threading.get_ident())


def test_where_no_thread_has_time_the_stream_ends_without_an_event() -> None:
    writer, (_, last) = streamed(threads=1)
    assert last == {"type": "http.response.body", "body": b"", "more_body": False}
    assert not writer.error_thread


def test_a_large_event_is_sent_in_pieces() -> None:
    class Writer(EndingWriter):
        def stream_end(self, *_: object) -> bytes:
            return bytes(range(250)) * 4000

    _, *sent = run_stream(EndedGeneration(9), Writer(repeats=False), request_bytes=10)
    assert b"".join(each["body"] for each in sent) == bytes(range(250)) * 4000
    assert max(len(each["body"]) for each in sent) <= 256 * 1024
    assert [each["more_body"] for each in sent] == [True, True, True, False]


@pytest.mark.parametrize("repeats", [False, True])
def test_events_that_repeat_a_large_answer_are_written_on_a_thread(repeats: bool) -> None:
    writer = EndingWriter(repeats)
    run_stream(EndedGeneration(9), writer, request_bytes=10)
    assert writer.inline == [True, True, not repeats, not repeats]


@pytest.mark.parametrize(
    ("path", "body", "held"),
    [
        ("/v1/messages", {"max_tokens": 9, "messages": HI, "stream": True}, 0),
        ("/v1/responses", {"input": "hi", "stream": True}, 0),
        ("/api/chat", {"model": "tiny", "messages": HI}, 1),
    ],
)
def test_a_client_that_leaves_a_stream_of_any_api_frees_the_engine(
    server: Server, path: str, body: dict[str, Any], held: int
) -> None:
    engine = server.join("hello world", hold_tokens_after=held)
    with server.client.stream("POST", path, json=body) as answer:
        chunks = answer.iter_bytes()  # closes the connection when it is deleted
        next(chunks)
        eventually(lambda: bool(engine.running))
    eventually(lambda: not engine.running)
    assert len(engine.got(Abort)) == 1
