"""Faster startup, and measurements of it."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shared.imports.transformers_index import remember_transformers

logger = logging.getLogger(__name__)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import and load without garbage collections, because there is no garbage yet, and without a
    search through the sources of transformers' models."""
    remember_transformers()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class StartTimes:
    """The duration of each part of startup, and its CPU seconds on all threads."""

    def __init__(self) -> None:
        self._began, self._cpu_s = time.monotonic(), time.process_time()
        self._cpu_began_s = self._cpu_s  # the process may have been a spare one before
        self._part_began = self._began
        self._parts: list[str] = []

    def ended(self, part: str) -> None:
        """Record and log the end of ``part``, which began at the end of the previous part."""
        now, now_s = time.monotonic(), time.process_time()
        logger.info("%s took %.1f s", part, now - self._part_began)
        self._part_began = now
        self._parts.append(f"{part} {now_s - self._cpu_s:.1f}")
        self._cpu_s = now_s

    def __str__(self) -> str:
        elapsed_s = time.monotonic() - self._began
        parts = ", ".join(self._parts)
        cpu_s = self._cpu_s - self._cpu_began_s
        return f"{elapsed_s:.1f} s, {cpu_s:.1f} s of CPU time: {parts}"
