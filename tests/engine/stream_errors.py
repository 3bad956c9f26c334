"""Errors of a piece of work in flight, injected while another part uses MLX's stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.plan import StepResult
from tests.engine.conftest import Wrap
from tests.engine.whole import Whole


def unreadable(path: Path) -> mx.array:
    """Return an array that MLX can only fail to compute, on its own thread."""
    mx.save(str(path), mx.ones((1000, 1000)))
    array = mx.load(str(path))
    os.truncate(path, 4000)
    return array + 1


class BrokenPiece:
    """Lets the piece of work in flight fail once. MLX keeps its error for whoever uses the stream
    next."""

    def __init__(self, whole: Whole, path: Path, wrap: Wrap) -> None:
        self._whole, self._path = whole, path
        self._line = whole.executor._line  # type: ignore[attr-defined]
        self._pending: set[int] = set()  # the plans whose results depend on it
        self.is_sent = False
        self.recoveries: list[str] = []

        @wrap(whole.scheduler, "apply")
        def checked(apply: Callable[[StepResult], None], result: StepResult) -> None:
            assert result.step not in self._pending, "its tokens were used"
            apply(result)

        @wrap(whole.scheduler, "recover")
        def noted(recover: Callable[..., bool], reason: str, **options: Any) -> bool:
            self.recoveries.append(reason)
            return recover(reason, **options)

    def send(self) -> None:
        """Add work that fails to the piece in flight, unless there is none or one has failed."""
        if self._line.piece is not None and not self.is_sent:
            self.is_sent = True
            self._line.send([unreadable(self._path)])
            self._pending = {step.number for step in self._whole.scheduler._in_flight}

    def check(self) -> None:
        """Check that its step failed, and that all requests ended well."""
        assert self.is_sent
        assert len(self.recoveries) == 1 and "Unable to read" in self.recoveries[0]
        assert not self._whole.refused
        assert {end.finish for end in self._whole.ends.values()} <= {"length", "stop"}
