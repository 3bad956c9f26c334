"""The main thread's state, which the IO thread sends in heartbeats."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shared.wire import EngineStats, LiveRequest, Phase


@dataclass
class EngineStatus:
    """Written by the main thread, read by the IO thread; each field is replaced as a whole."""

    phase: Phase = "loading"
    reason: str = ""
    """Why it is still loading. For the supervisor."""
    phase_since: float = field(default_factory=time.monotonic)
    live: list[LiveRequest] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    """Without the kvstore's figures, which the IO thread adds."""
    device_bytes: int | None = None
    """The memory of the device, once known. For the supervisor."""
    progress: int = 0
    """Increases with every token computed or delivered. An engine with requests is stuck if this
    does not change."""

    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.phase_since = time.monotonic()


class StallWatch:
    """Measures how long an engine with work has made no progress."""

    def __init__(self) -> None:
        self._progress = -1
        self._since = time.monotonic()

    def exclude(self, suspended_s: float) -> None:
        """Exclude a time in which the whole process was suspended."""
        self._since += suspended_s

    def stalled_s(self, status: EngineStatus, waiting: bool, now: float) -> float:
        """Return the seconds without progress; 0 without work, and while loading or warming up.

        Work means messages ``waiting`` for the main thread, or accepted requests. Requests whose
        grammars are being compiled do not count, because compiling has its own time limit.
        """
        self.observe(status, waiting, now)
        return now - self._since

    def observe(self, status: EngineStatus, waiting: bool, now: float) -> None:
        """Notice progress, or that there is no work. The time before work arrives is counted,
        unless this is called right before."""
        idle = not waiting and not any(request.accepted for request in status.live)
        if idle or status.phase in ("loading", "warming") or status.progress != self._progress:
            self._progress = status.progress
            self._since = now
