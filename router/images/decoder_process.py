"""The router's side of an image decoder process."""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from router.images.decoder import DecodedImage, DecodeJob
from shared.paths import python_path
from shared.sandbox.pipe_frames import LENGTH
from shared.wire import MAX_IMAGE_BYTES

TIME_LIMIT_S = 10.0
"""Time limit for one image."""
START_LIMIT_S = 60.0
"""Extra time for the first image of a process: it imports libraries and loads a processor."""
_MAX_ANSWER_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
MAX_PROCESSORS = 4
"""Max number of processors that a process loads. They are never dropped, and models come and go."""


class DecoderLost(Exception):
    """The process ended, or was killed because it took too long."""

    def __init__(self, *, is_late: bool, used_s: float = 0.0) -> None:
        """``used_s`` is the processor time that it used for the image."""
        super().__init__()
        self.is_late = is_late
        self.may_succeed = used_s < TIME_LIMIT_S / 2
        """Whether another process may succeed: this one was killed or stopped, or short of time."""


class DecoderAnswer(NamedTuple):
    answer: DecodedImage
    frames: list[memoryview]
    """The bytes of each array."""


class DecoderProcess:
    """One process, started on demand and restarted on demand after a crash.

    Only one thread at a time may call `prepare`; any thread may call `close`.
    """

    module = "router.images.decoder"
    """What the process runs."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folders: set[str] = set()
        """The models whose processors the process has loaded."""
        self._used_s = 0.0
        """The processor time of the process until its last answer."""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id; None if it is not running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def prepare(self, job: DecodeJob, content: bytes) -> DecoderAnswer:
        """Return the prepared image for ``content``. Raises `DecoderLost`, and OSError if no
        process can be started."""
        if job.folder not in self._folders and len(self._folders) >= MAX_PROCESSORS:
            self._end()
        process = self._running()
        limit_s = self._time_limit_s + (0 if job.folder in self._folders else START_LIMIT_S)
        deadline = time.monotonic() + limit_s
        try:
            for frame in (msgspec.msgpack.encode(job), content):
                _write(process, LENGTH.pack(len(frame)), deadline)
                _write(process, frame, deadline)
            answer = msgspec.msgpack.decode(
                self._read_frame(process, _MAX_ANSWER_BYTES, deadline), type=DecodedImage
            )
            room, frames = MAX_IMAGE_BYTES, list[memoryview]()
            for _ in answer.specs:
                frames.append(self._read_frame(process, room, deadline))
                room -= len(frames[-1])
        except (BrokenPipeError, EOFError, msgspec.MsgspecError):
            self._end()
            raise DecoderLost(is_late=False) from None
        except TimeoutError:
            before_s = self._used_s
            raise DecoderLost(is_late=True, used_s=self._end() - before_s) from None
        except BaseException:  # the rest of its reply would be read as the next image's
            self._end()
            raise
        self._folders.add(job.folder)
        self._used_s = answer.processor_s
        return DecoderAnswer(answer, frames)

    def close(self) -> None:
        """Kill the process for good, even while it decodes."""
        self._closed = True
        self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self.pid is not None:
            return self._process
        self._end()
        if self._closed:
            raise OSError("the router is shutting down")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self.module],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # ^C is meant for the supervisor
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _end(self) -> float:
        """End the process, if there is one. Return the processor time that it used, as far as the
        system knows it."""
        process, self._process = self._process, None
        self._folders.clear()
        self._used_s = used_s = 0.0
        if process is not None:
            if process.poll() is None:
                process.kill()
                with suppress(ChildProcessError):  # it was waited for elsewhere
                    _, status, usage = os.wait4(process.pid, 0)
                    process.returncode = os.waitstatus_to_exitcode(status)
                    used_s = usage.ru_utime + usage.ru_stime
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        return used_s

    def _read_frame(
        self, process: subprocess.Popen[bytes], max_bytes: int, deadline: float
    ) -> memoryview:
        (length,) = LENGTH.unpack(_read(process, LENGTH.size, deadline))
        if length > max_bytes:
            raise EOFError("its reply is too large")
        return _read(process, length, deadline)


def _write(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    assert process.stdin is not None
    fd, rest = process.stdin.fileno(), memoryview(data)
    while rest:
        _wait(fd, select.POLLOUT, deadline)
        try:
            rest = rest[os.write(fd, rest[:_PIECE_BYTES]) :]
        except BlockingIOError:
            continue


def _read(process: subprocess.Popen[bytes], length: int, deadline: float) -> memoryview:
    assert process.stdout is not None
    fd, found = process.stdout.fileno(), _buffer(length)
    rest = found
    while rest:
        _wait(fd, select.POLLIN, deadline)
        count = os.readv(fd, [rest[:_PIECE_BYTES]])
        if not count:
            raise EOFError("it exited")
        rest = rest[count:]
    return found


def _buffer(length: int) -> memoryview:
    """Return a buffer of ``length`` bytes. A large one is not zeroed, which would block the
    interpreter for tens of milliseconds."""
    return memoryview(bytearray(length) if length <= _PIECE_BYTES else mmap.mmap(-1, length))


def _wait(fd: int, event: int, deadline: float) -> None:
    """Wait for ``event``. Raises TimeoutError. (`select.select` cannot handle descriptors over
    1,023.)"""
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
