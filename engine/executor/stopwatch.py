"""Clocks of an executor's steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Measures the host's time in each dispatch: building, computing and sampling."""

    def __init__(self, asynchronous: bool) -> None:
        """``asynchronous``: computing only queues work for a device, and counts as building.
        Otherwise the host itself computes."""
        self._asynchronous = asynchronous
        self.start()

    def start(self) -> None:
        self._started = time.perf_counter()
        self._computing_s = self._sampling_s = self._waiting_s = 0.0

    def stop(self) -> tuple[float, float]:
        """Return the seconds of building and of sampling since the start."""
        spent_s = time.perf_counter() - self._started - self._sampling_s - self._waiting_s
        return spent_s - (0.0 if self._asynchronous else self._computing_s), self._sampling_s

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the model's passes and copies of its KV."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._computing_s += time.perf_counter() - begun

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude time in which the host waits for the device."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._waiting_s += time.perf_counter() - begun

    @contextmanager
    def sampling(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._sampling_s += time.perf_counter() - begun


class StepClock:
    """Measures the time of each step, without the time shared with the step before it."""

    def __init__(self) -> None:
        self.last_read = 0.0

    def elapsed_s(self, started: float) -> float:
        """Return the seconds since ``started``, or since the last call if that is later."""
        last, self.last_read = self.last_read, time.perf_counter()
        return self.last_read - max(started, last)
