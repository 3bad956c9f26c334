"""Where the host's time goes while a step is put together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Of one dispatch after the other. ``asynchronous``: what is called computing only hands
    work to a device, and is part of building; else the host itself computes."""

    def __init__(self, asynchronous: bool) -> None:
        self._asynchronous = asynchronous
        self.start()

    def start(self) -> None:
        self._started = time.perf_counter()
        self._computing_s = self._sampling_s = 0.0

    def stop(self) -> tuple[float, float]:
        """Seconds of building and of sampling since the start."""
        spent_s = time.perf_counter() - self._started - self._sampling_s
        return spent_s - (0.0 if self._asynchronous else self._computing_s), self._sampling_s

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The model's passes, and copies of its KV."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._computing_s += time.perf_counter() - begun

    @contextmanager
    def sampling(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._sampling_s += time.perf_counter() - begun
