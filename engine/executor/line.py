"""The queue of work on the device, and its timing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.backend.device_errors import compute
from engine.executor.stopwatch import StepClock

LONGEST_PAUSE_S = 0.02
"""Limit of the time between two pieces that counts as the host's work for the second."""


@dataclass(eq=False)
class Piece:
    """Work that is dispatched without waiting in between."""

    started: float
    holds_pages: bool = False
    elapsed_s: float | None = None
    """Set once it is done: seconds, without those shared with the previous piece."""


class DeviceLine:
    """The piece of work running on the device, at most one at a time.

    MLX writes an array in place only while nothing else refers to its buffer. A kernel's inputs
    are referenced until its command buffer has run, and so is each array that is evaluated by
    name. Work that writes pages would copy them whole if it were dispatched while such work is
    in flight. A step's graph is therefore built while the device is busy, and dispatched when
    the previous piece is done: the device is idle for about the time of dispatching a few
    kernels."""

    def __init__(self, *, waits: bool = False) -> None:
        """``waits``: whether `send` waits for each piece. On a CPU, little is left to compute, and
        waking MLX's own thread for it takes longer."""
        self._waits = waits
        self._clock = StepClock()
        self.piece: Piece | None = None
        """The piece not waited for yet."""
        self._marker: mx.array | None = None
        self._kept: list[Any] = []

    def begin(self, goes_on: bool) -> float:
        """Return the time from which a piece counts that is built from now on.

        If nothing is in flight although a sequence ``goes_on``, it had to wait for its token. What
        the host did since then counts too, as it does where pieces overlap."""
        now = time.perf_counter()
        if goes_on and self.piece is None:
            return max(self._clock.last_read, now - LONGEST_PAUSE_S)
        return now

    def send(
        self,
        arrays: Sequence[Any],
        *,
        holds_pages: bool = True,
        kept: bool = False,
        since: float | None = None,
    ) -> Piece:
        """Dispatch ``arrays`` (a tree of them) as a part of the piece in flight, or as a piece that
        is done. Raises: RuntimeError, if it waits.

        ``holds_pages``: whether they are arrays of pages, or depend on them. ``kept``: whether they
        are kept for long; `wait` then waits for each, because an array that nobody waits for keeps
        an event of the device, of which there is a limited number. A new piece is timed from
        ``since``, when the host started to build it: the time that the device waited for it counts
        too."""
        started = time.perf_counter() if since is None else since
        if self._waits:
            compute(arrays)
            return Piece(started, holds_pages, self._clock.elapsed_s(started))
        if self.piece is None:
            self.piece = Piece(started)
        self.piece.holds_pages |= holds_pages
        # All arrays of a call share an event, which is signalled once all are computed. A reference
        # to one of `arrays` might prevent pages from being written in place.
        self._marker = mx.zeros(1, mx.int32)
        mx.async_eval(arrays, self._marker)
        self._kept += arrays if kept else ()
        return self.piece

    def wait(self) -> None:
        """Wait until the piece in flight is done, if there is one. Raises: RuntimeError if the
        device could not compute it."""
        if self.piece is not None:
            compute(self._marker)
            mx.eval(self._kept)
            self.piece.elapsed_s = self._clock.elapsed_s(self.piece.started)
            self.piece = self._marker = None
            self._kept.clear()

    def abandon(self) -> None:
        """Wait until nothing is in flight, whatever became of it. An error that nobody has seen
        would be raised by the next piece."""
        if self.piece is not None:
            with suppress(RuntimeError):
                mx.eval(self._marker)
            with suppress(RuntimeError):
                mx.synchronize()
            self.piece = self._marker = None
            self._kept.clear()

    def wait_for_pages(self) -> None:
        """Wait until pages can be written in place."""
        if self.piece is not None and self.piece.holds_pages:
            self.wait()
