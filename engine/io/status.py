"""What the main thread leaves for the IO thread to tell the others."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shared.wire import EngineStats, LiveRequest, Phase


@dataclass
class EngineStatus:
    """Written by the main thread, read by the IO thread; each field is replaced whole.

    ``progress`` rises with every token computed or delivered: an engine that has
    requests while it stands still is stuck. The kvstore's part of ``stats`` is filled
    in by the IO thread.
    """

    phase: Phase = "loading"
    phase_since: float = field(default_factory=time.monotonic)
    live: list[LiveRequest] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    progress: int = 0

    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.phase_since = time.monotonic()


class StallWatch:
    """Measures for how long an engine with work has made no progress."""

    def __init__(self) -> None:
        self._progress = -1
        self._since = time.monotonic()

    def stalled_s(self, status: EngineStatus, waiting: bool, now: float) -> float:
        """Seconds without progress, 0 when there is nothing to do or a declared phase
        (loading, warming) explains it. ``waiting``: messages wait for the main thread.
        Those whose grammars are being compiled, which has a time limit of its own, do not count."""
        idle = not waiting and not any(request.accepted for request in status.live)
        if idle or status.phase in ("loading", "warming") or status.progress != self._progress:
            self._progress = status.progress
            self._since = now
        return now - self._since
