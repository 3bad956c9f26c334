"""The side of a process that has another one work for it, in frames on pipes."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from shared.environment import sandbox_environment
from shared.sandbox.pipe_frames import LENGTH, framed, write_some

ABANDON_EVERY_S = 0.5
"""Interval for checking whether anyone still wants an answer. Not immediately: restarting a killed
process takes longer than most jobs."""
_PIECE_BYTES = 1 << 20


class WorkerLost(Exception):
    """The process ended, or was killed at the deadline of its job."""

    def __init__(self, *, is_late: bool, used_s: float = 0.0) -> None:
        """``used_s`` is the processor time that it used for a job that was late."""
        super().__init__()
        self.is_late, self.used_s = is_late, used_s


class WorkerProcess:
    """Runs a module that handles untrusted input, without secrets (`shared.environment`). It is
    started on demand and after it was lost.

    Only one thread at a time may use it; any thread may call `close`.
    """

    def __init__(self, module: str) -> None:
        self.processor_s = 0.0
        """The processor time that it had used when it sent its last answer."""
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id; None if it is not running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> bool:
        """Start the process unless it runs. Return whether it was started. Raises OSError."""
        if self.pid is not None:
            return False
        self.end()
        if self._closed:
            raise OSError("the server is shutting down")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            env=sandbox_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Rust writes its panics there
            start_new_session=True,  # ^C is meant for the supervisor
            bufsize=0,
        )
        self.processor_s = 0.0
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            _enlarge(pipe.fileno())
        return True

    @contextmanager
    def working(self) -> Iterator[None]:
        """A job is written and its answer read and decoded in this block. If that fails, the
        process is killed: what is left of an answer would be read as the next one. Raises
        `WorkerLost`, and what the block raises for other reasons."""
        try:
            yield
        except (BrokenPipeError, EOFError, msgspec.MsgspecError):
            self.end()
            raise WorkerLost(is_late=False) from None
        except TimeoutError:
            used_s = self.end() - self.processor_s
            raise WorkerLost(is_late=True, used_s=max(0.0, used_s)) from None
        except BaseException:
            self.end()
            raise

    def write(self, deadline: float, *frames: bytes) -> None:
        """Write ``frames``. Raises TimeoutError at ``deadline``, and BrokenPipeError if the process
        exited."""
        assert self._process is not None and self._process.stdin is not None
        fd, rest = self._process.stdin.fileno(), framed(frames)
        while rest:
            try:
                rest = write_some(fd, rest)
            except BlockingIOError:
                _wait(fd, select.POLLOUT, deadline)

    def read(
        self, deadline: float, max_bytes: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> memoryview:
        """Return the next frame. Raises TimeoutError at ``deadline``, or soon after it is not
        wanted any more, and EOFError if the process exited or the frame is larger than
        ``max_bytes``."""
        assert self._process is not None and self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while time.monotonic() < deadline - ABANDON_EVERY_S:
            with suppress(TimeoutError):
                _wait(fd, select.POLLIN, time.monotonic() + ABANDON_EVERY_S)
                break
            if not is_wanted():
                raise TimeoutError
        (length,) = LENGTH.unpack(_read(fd, LENGTH.size, deadline))
        if length > max_bytes:
            raise EOFError("its reply is too large")
        return _read(fd, length, deadline)

    def end(self) -> float:
        """Kill the process, if there is one. Return the processor time that it used, as far as the
        system knows it."""
        process, self._process = self._process, None
        used_s = 0.0
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

    def close(self) -> None:
        """Kill the process for good, even while it works."""
        self._closed = True
        self.end()


def _enlarge(fd: int) -> None:
    """Give a pipe room for a large frame, where that is possible. Each time that a pipe is full or
    empty, both processes wait for each other, and this one for its interpreter."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):  # its user has many of them
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIECE_BYTES)


def _read(fd: int, length: int, deadline: float) -> memoryview:
    found = _buffer(length)
    rest = found
    while rest:
        try:
            count = os.readv(fd, [rest[:_PIECE_BYTES]])
        except BlockingIOError:
            _wait(fd, select.POLLIN, deadline)
            continue
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
