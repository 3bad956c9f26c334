"""The router's side of an image decoder process."""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from router.images.decoder import DecodedImage, DecodeJob
from shared.sandbox.worker_process import WorkerProcess
from shared.wire import MAX_IMAGE_BYTES

TIME_LIMIT_S = 10.0
"""Time limit for one image."""
START_LIMIT_S = 60.0
"""Extra time for the first image of a process: it imports libraries and loads a processor."""
_MAX_ANSWER_BYTES = 64 << 20
MAX_PROCESSORS = 4
"""Max number of processors that a process loads. They are never dropped, and models come and go."""


class DecoderAnswer(NamedTuple):
    answer: DecodedImage
    frames: list[memoryview]
    """The bytes of each array."""


class DecoderProcess:
    """One process, started on demand and restarted on demand after a crash.

    Only one thread at a time may call `prepare`; any thread may call `close`.
    """

    module = "router.images.decoder"
    """The module that the process runs."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._worker = WorkerProcess(self.module)
        self._folders: set[str] = set()
        """The models whose processors the process has loaded."""

    @property
    def pid(self) -> int | None:
        """The process id; None if it is not running."""
        return self._worker.pid

    def prepare(self, job: DecodeJob, content: bytes) -> DecoderAnswer:
        """Return the prepared image for ``content``. Raises `WorkerLost`, and OSError if no
        process can be started."""
        if job.folder not in self._folders and len(self._folders) >= MAX_PROCESSORS:
            self._worker.end()
        if self._worker.start():
            self._folders.clear()
        limit_s = self._time_limit_s + (0 if job.folder in self._folders else START_LIMIT_S)
        deadline = time.monotonic() + limit_s
        with self._worker.working():
            self._worker.write(deadline, msgspec.msgpack.encode(job), content)
            answer = msgspec.msgpack.decode(
                self._worker.read(deadline, _MAX_ANSWER_BYTES), type=DecodedImage
            )
            room, frames = MAX_IMAGE_BYTES, list[memoryview]()
            for _ in answer.specs:
                frames.append(self._worker.read(deadline, room))
                room -= len(frames[-1])
        self._folders.add(job.folder)
        self._worker.processor_s = answer.processor_s
        return DecoderAnswer(answer, frames)

    def close(self) -> None:
        """Kill the process for good, even while it decodes."""
        self._worker.close()
