"""Threads for work whose cost depends on the client: rendering, tokenizing, parsing, formatting.

None of it runs on the event loop. Python runs one thread at a time, so pure Python work still takes
turns with the loop; tokenizers release the interpreter.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from router.errors import ApiError, TooManyRequests, Unavailable

logger = logging.getLogger(__name__)

SMALL_SIZE = 32 * 1024
"""Max size of a small job, which takes tens of milliseconds."""
INLINE_SIZE = 16 * 1024
"""Max size of work that is cheaper to do immediately than on a thread. Only for work that takes
less than a nanosecond per unit, such as decoding JSON."""
MAX_WAITING = 512
MAX_WAITING_OF_KEY = 256
DEADLINE_S = 30.0
REST_FACTOR = 2
MAX_REST_S = 0.1
"""After a job, a thread sleeps this many times as long as the job took, at most `MAX_REST_S`.
Single calls hold the interpreter for tens of milliseconds, such as decoding a megabyte of JSON:
without pauses they would leave the event loop one turn between them."""
_NO_REST_S = 0.001
"""Shorter jobs need no pause."""
SECONDS_PER_UNIT = 2e-6
"""What a job is charged when it begins; when it ends, the charge is replaced with its
actual time."""
_MAX_KEYS = 1024
_RETRY_AFTER_S = 2.0

_Result = TypeVar("_Result")


_numbers = itertools.count()
_of_job = threading.local()


def add_job_time(seconds: float) -> None:
    """Charge processor time that another process used for the job of this thread, if it has one."""
    if hasattr(_of_job, "elsewhere_s"):
        _of_job.elsewhere_s += seconds


def job_time_s() -> float:
    """Return what `add_job_time` has charged for the job of this thread."""
    return float(getattr(_of_job, "elsewhere_s", 0.0))


class _Job:
    def __init__(
        self, key: str, size: int, work: Callable[[], Any], future: asyncio.Future[Any] | None
    ) -> None:
        self.number = next(_numbers)
        self.key = key
        self.size = size
        self.work = work
        self.future = future
        """None if nothing waits for the result."""

    @property
    def is_large(self) -> bool:
        return self.size > SMALL_SIZE

    @property
    def dropped(self) -> bool:
        return self.future is not None and self.future.done()


class WorkPool:
    """Runs jobs on a few threads, fairly between API keys according to their cost.

    The key that has used the threads least goes first; a returning key starts at the level of the
    others. The jobs of a key begin in order. The first thread takes small jobs only, so that they
    never wait for a large one. The others together leave the interpreter free for two thirds of the
    time, so that large requests cannot take it from the event loop. No key has all of them with
    large jobs, so a large job does not wait for one of another key that takes seconds.

    A job that does not fit into the queue is rejected. A job is dropped if its future is cancelled
    before it begins, and fails if it is not done by its deadline. Once begun, it runs to its end,
    so its size must be bounded beforehand.
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        max_waiting: int = MAX_WAITING,
        max_waiting_of_key: int = MAX_WAITING_OF_KEY,
        deadline_s: float = DEADLINE_S,
        on_refused: Callable[[], None] = lambda: None,
        jobs_wait: bool = False,
    ) -> None:
        """``on_refused`` is called for each job that finds the queue full or misses its deadline.
        If ``jobs_wait`` for other processes, they are charged for that time, and threads need no
        pauses."""
        self._max_waiting = max_waiting
        self._max_waiting_of_key = max_waiting_of_key
        self._deadline_s = deadline_s
        self._waiting: dict[str, tuple[deque[_Job], deque[_Job]]] = {}
        """By key: small jobs and large ones. A key is present as long as it has queued jobs."""
        self._num_waiting = 0
        self._used_s: dict[str, float] = {}
        """By key: the time its jobs have taken, starting from the level when the key was first
        seen."""
        self._clock_s = 0.0
        """The level of the key whose job began last."""
        self._large_running: Counter[str] = Counter()
        """By key: its large jobs that run."""
        self._changed = threading.Condition()
        """Guards everything above."""
        self._closed = False
        self._on_refused = on_refused
        self._jobs_wait = jobs_wait
        count = threads or max(3, min(4, (os.cpu_count() or 1) // 2))
        self._max_large_of_key = max(1, count - 2)
        self._rest_factor = REST_FACTOR * max(1, count - 1)
        for number in range(count):
            thread = threading.Thread(
                target=self._run, args=(number == 0 and count > 1,), name="work", daemon=True
            )
            thread.start()

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def close(self) -> None:
        """Start no more jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def run(self, key: str, work: Callable[[], _Result], size: int) -> _Result:
        """Return the result of ``work``, of about ``size`` characters. Raises what it raises,
        `TooManyRequests` and `Unavailable`."""
        return await self.start(key, work, size)

    async def run_large(self, key: str, work: Callable[[], _Result], size: int) -> _Result:
        """Run ``work`` immediately if its size is at most `INLINE_SIZE`, otherwise with `run`."""
        return work() if size <= INLINE_SIZE else await self.start(key, work, size)

    def start(self, key: str, work: Callable[[], _Result], size: int) -> asyncio.Future[_Result]:
        """Return a future of `run`. Cancelling it before the work begins drops the work."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = loop.create_future()
        self._add(_Job(key, size, work, future))
        timer = loop.call_later(self._deadline_s, self._expire, future)
        future.add_done_callback(lambda _: timer.cancel())
        return future

    def start_unattended(self, key: str, work: Callable[[], object], size: int) -> None:
        """Run ``work`` without waiting for its result, unless the queue is full."""
        with suppress(ApiError):
            self._add(_Job(key, size, work, None))

    def _expire(self, future: asyncio.Future[Any]) -> None:
        if not future.done():
            self._on_refused()
            future.set_exception(
                Unavailable(
                    f"The request was not prepared within {self._deadline_s:g} s.",
                    code="server_busy",
                    retry_after_s=_RETRY_AFTER_S,
                )
            )

    def _add(self, job: _Job) -> None:
        """Add ``job`` to the queue. Raises `TooManyRequests` or `Unavailable`."""
        with self._changed:
            of_key = self._num_waiting_of(job.key)
            if self._num_waiting >= self._max_waiting or of_key >= self._max_waiting_of_key:
                self._drop_cancelled()
            if self._num_waiting_of(job.key) >= self._max_waiting_of_key:
                self._on_refused()
                raise TooManyRequests(
                    f"{self._max_waiting_of_key} requests of this API key are already waiting to "
                    "be prepared.",
                    code="queue_full",
                    retry_after_s=_RETRY_AFTER_S,
                )
            if self._num_waiting >= self._max_waiting:
                self._on_refused()
                raise Unavailable(
                    f"{self._num_waiting} requests are already waiting to be prepared.",
                    code="server_busy",
                    retry_after_s=_RETRY_AFTER_S,
                )
            if (queues := self._waiting.get(job.key)) is None:
                queues = self._waiting[job.key] = (deque(), deque())
                self._used_s[job.key] = max(self._used_s.get(job.key, 0.0), self._clock_s)
            queues[job.is_large].append(job)
            self._num_waiting += 1
            self._changed.notify_all()

    def _num_waiting_of(self, key: str) -> int:
        return sum(map(len, self._waiting.get(key, ())))

    def _drop_cancelled(self) -> None:
        for key, queues in list(self._waiting.items()):
            for each in queues:
                kept = [job for job in each if not job.dropped]
                self._num_waiting -= len(each) - len(kept)
                each.clear()
                each.extend(kept)
            if not any(queues):
                del self._waiting[key]

    # -- on the threads --------------------------------------------------------

    def _run(self, small_only: bool) -> None:
        while (job := self._next(small_only)) is not None:
            clock = time.monotonic if self._jobs_wait else time.thread_time
            _of_job.elsewhere_s = 0.0
            began = clock()
            error: BaseException | None = None
            result: Any = None
            try:
                result = job.work()
            except BaseException as raised:  # any exception belongs to the caller
                error = raised
            took_s = clock() - began
            self._charge(job, took_s + (0.0 if self._jobs_wait else job_time_s()))
            del _of_job.elsewhere_s
            _finish(job, result, error)
            del job, result, error
            if took_s > _NO_REST_S and not small_only and not self._jobs_wait:
                time.sleep(min(took_s * self._rest_factor, MAX_REST_S))

    def _next(self, small_only: bool) -> _Job | None:
        """Return the next job once there is one. None after `close`."""
        with self._changed:
            while not self._closed:
                job = self._take(small_only)
                if job is None:
                    self._changed.wait()
                elif not job.dropped:
                    self._clock_s = self._used_s[job.key]
                    self._used_s[job.key] += job.size * SECONDS_PER_UNIT
                    self._large_running[job.key] += job.is_large
                    return job
        return None

    def _take(self, small_only: bool) -> _Job | None:
        usable = {
            key: found
            for key, queues in self._waiting.items()
            if (found := self._usable(key, queues, small_only))
        }
        if not usable:
            return None
        key = min(usable, key=self._used_s.__getitem__)
        queues = self._waiting[key]
        job = min(usable[key], key=lambda each: each[0].number).popleft()
        self._num_waiting -= 1
        if not any(queues):
            del self._waiting[key]
        return job

    def _usable(
        self, key: str, queues: tuple[deque[_Job], deque[_Job]], small_only: bool
    ) -> list[deque[_Job]]:
        """Return those of the ``queues`` of ``key`` whose first job a thread may take."""
        takes_large = not small_only and self._large_running[key] < self._max_large_of_key
        return [each for each in (queues if takes_large else queues[:1]) if each]

    def _charge(self, job: _Job, took_s: float) -> None:
        with self._changed:
            if job.is_large:
                self._large_running -= Counter((job.key,))  # drops zeros
                self._changed.notify_all()
            charged_s = job.size * SECONDS_PER_UNIT
            self._used_s[job.key] = self._used_s.get(job.key, 0.0) + took_s - charged_s
            if len(self._used_s) > _MAX_KEYS:
                active = self._waiting
                self._used_s = {
                    key: used_s
                    for key, used_s in self._used_s.items()
                    if key in active or used_s > self._clock_s
                }


def _finish(job: _Job, result: Any, error: BaseException | None) -> None:
    """Pass the outcome of ``job`` to its future, on the future's event loop."""
    future = job.future
    if future is None:
        if error is not None:
            logger.error("background work failed", exc_info=error)
        return

    def settle() -> None:
        if future.done():  # cancelled, or too late
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(settle)
