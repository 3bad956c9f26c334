"""The router's side of the processes that render chat templates."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

import router.errors
from router.errors import InvalidRequest, Unavailable
from router.schemas.conversation import ChatMessage, PromptEnding, Tool
from router.schemas.images import ModelImage
from router.tokens.template_process import (
    MORE_TEXT_BYTES,
    TEXT_FACTOR,
    Excess,
    RenderAnswer,
    RenderJob,
)
from router.tokens.templates import Rendered
from router.tokens.work_pool import add_job_time, job_time_s
from shared.sandbox.worker_process import WorkerLost, WorkerProcess

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 5.0
"""Limit on the processor time of a request's renderings. A megabyte of text takes milliseconds, and
1,500 calls with results in gpt-oss' template 3 s of a busy x86 core."""
WALL_LIMIT_S = 20.0
_PROCESSES_LOST = 3
"""Processes that a conversation may cost before it is refused: those that were idle may have been
killed for another reason."""
_SPARE_AFTER_S = 0.05
"""If all processes are busy for so long, another one is started: a start takes seconds of a
processor, and nearly all renderings less than a millisecond."""
_REFUSE_S = 60.0
_SMALL_BYTES = 4096
"""A template that exceeds the limits with a smaller conversation is not tried again for some
time."""
_EXCESSES: Mapping[Excess, str] = {
    "time": f"takes more than {TIME_LIMIT_S:g} s of processor time",
    "memory": "takes more than a gigabyte of memory",
    "text": "writes many times the text that it is given",
}


class TemplateProcesses:
    """Starts two processes, and another one whenever all are busy for longer than ordinary
    renderings take: at most as many as there are threads that render, and one more."""

    module = "router.tokens.template_process"

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._changed = threading.Condition()
        """Of the attributes above and below."""
        self._spare_timer: threading.Timer | None = None  # while all are busy
        self._closed = False
        self._refused: dict[bytes, tuple[float, str]] = {}
        """By template: until when it is not tried, and why."""

    @property
    def pids(self) -> list[int]:
        """The ids of those that run."""
        with self._changed:
            return [each.pid for each in (*self._idle, *self._busy) if each.pid is not None]

    def rendered(
        self,
        template: bytes,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        template_args: Mapping[str, Any],
        ending: PromptEnding,
    ) -> Rendered:
        """Return what `ChatTemplate.rendered` returns for ``template``, an encoded `TemplateSpec`.
        Raises what it raises, `InvalidRequest` if the template exceeds a limit, and
        `Unavailable`."""
        images: list[ModelImage] = []

        def number(image: ModelImage) -> int:
            images.append(image)
            return len(images) - 1

        job = msgspec.json.encode(
            RenderJob(
                messages=messages,
                tools=tools,
                template_args=dict(template_args),
                ending=ending,
                limit_s=max(0.1, TIME_LIMIT_S - job_time_s()),
            ),
            enc_hook=number,
        )
        until, why = self._refused.get(template, (0.0, ""))
        if time.monotonic() < until:
            raise _exceeded(why)
        answer = self._answer(template, job)
        if answer.excess is not None:
            why = _EXCESSES[answer.excess]
            logger.warning("a chat template %s for a conversation of %d bytes", why, len(job))
            if len(job) < _SMALL_BYTES:
                self._refuse(template, why)
            raise _exceeded(why)
        if answer.error:
            kind = getattr(router.errors, answer.error, InvalidRequest)
            kind = kind if issubclass(kind, InvalidRequest) else InvalidRequest
            raise kind(answer.message, param=answer.param or "messages", code=answer.code)
        return Rendered(answer.text, [images[number] for number in answer.images])

    def start(self) -> None:
        """Start processes before they are needed."""
        with self._changed:
            if not self._closed and not self._idle and not self._busy:
                self._idle += [self._started(), self._started()]

    def close(self) -> None:
        """Kill all processes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._spare_timer is not None:
                self._spare_timer.cancel()
            processes = [*self._idle, *self._busy]
        for process in processes:
            process.close()

    def _answer(self, template: bytes, job: bytes) -> RenderAnswer:
        for _ in range(_PROCESSES_LOST):
            try:
                with self._process() as process:
                    answer = process.rendered(template, job)
            except OSError as error:
                raise Unavailable(f"Cannot start a process for chat templates: {error}") from None
            except WorkerLost as error:
                add_job_time(error.used_s)
                if error.used_s >= TIME_LIMIT_S:
                    return RenderAnswer(excess="time")
                if error.is_late:
                    raise Unavailable(
                        f"The prompt was not rendered within {WALL_LIMIT_S:g} s.",
                        code="server_busy",
                    ) from None
            else:
                add_job_time(answer.used_s)
                return answer
        raise InvalidRequest(
            f"{_PROCESSES_LOST} processes that rendered the model's chat template died.",
            param="messages",
            code="template_limit",
        )

    @contextmanager
    def _process(self) -> Iterator[_Process]:
        """Provide a process for one job. Raises OSError after `close`."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._closed)
            if self._closed:
                raise OSError("the server is shutting down")
            process = self._idle.pop()
            self._busy.add(process)
            if not self._idle and self._spare_timer is None:
                self._spare_timer = threading.Timer(_SPARE_AFTER_S, self._add_spare)
                self._spare_timer.start()
        try:
            yield process
        finally:
            with self._changed:
                self._busy.discard(process)
                if self._closed:
                    process.close()
                else:
                    self._idle.append(process)
                    self._replace_lost()
                self._changed.notify()

    def _replace_lost(self) -> None:
        """Start those of the idle processes that have exited. They are used last, because they
        have to start."""
        lost = [each for each in self._idle if each.pid is None]
        for each in lost:
            each.start_early()
        self._idle = [*lost, *(each for each in self._idle if each not in lost)]

    def _add_spare(self) -> None:
        with self._changed:
            self._spare_timer = None
            if not self._idle and not self._closed:
                self._idle.append(self._started())
                self._changed.notify()

    def _started(self) -> _Process:
        process = _Process(self.module)
        process.start_early()
        return process

    def _refuse(self, template: bytes, why: str) -> None:
        now = time.monotonic()
        self._refused = {each: entry for each, entry in self._refused.items() if entry[0] > now}
        self._refused[template] = now + _REFUSE_S, why


class _Process(WorkerProcess):
    """One process. Only one thread at a time may use it."""

    def start_early(self) -> None:
        """Start it, if possible, and do not wait until it is ready."""
        with suppress(OSError):
            self.start()

    def rendered(self, template: bytes, job: bytes) -> RenderAnswer:
        """Raises `WorkerLost`, and OSError if the process cannot be started."""
        self.start()
        deadline = time.monotonic() + WALL_LIMIT_S
        most = TEXT_FACTOR * len(job) + 2 * MORE_TEXT_BYTES
        with self.working():
            self.write(deadline, template, job)
            answer = msgspec.msgpack.decode(self.read(deadline, most), type=RenderAnswer)
        self.processor_s = answer.processor_s
        return answer


def _exceeded(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The model's chat template {why} for these messages.",
        param="messages",
        code="template_limit",
    )
