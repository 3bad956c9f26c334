"""The figures of the main thread that the IO thread sends in beats."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shared.wire import EngineStats, LiveRequest, Phase


@dataclass
class EngineStatus:
    """Written by the main thread, read by the IO thread; each field is replaced whole."""

    phase: Phase = "loading"
    phase_since: float = field(default_factory=time.monotonic)
    live: list[LiveRequest] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    """Without the figures of the kvstore, which the IO thread adds."""
    device_bytes: int | None = None
    """The memory of the device, once it is known. For the supervisor."""
    progress: int = 0
    """Rises with every token computed or delivered. An engine that has requests while this
    stands still is stuck."""

    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self.phase_since = time.monotonic()


class StallWatch:
    """Measures how long an engine with work has made no progress."""

    def __init__(self) -> None:
        self._progress = -1
        self._since = time.monotonic()

    def forgive(self, asleep_s: float) -> None:
        """Do not count a time in which the whole process stood still."""
        self._since += asleep_s

    def stalled_s(self, status: EngineStatus, waiting: bool, now: float) -> float:
        """Return the seconds without progress; 0 without work, and while loading or warming.

        Work is messages ``waiting`` for the main thread, or accepted requests. Requests whose
        grammars are being compiled do not count, since compiling has a time limit of its own.
        """
        idle = not waiting and not any(request.accepted for request in status.live)
        if idle or status.phase in ("loading", "warming") or status.progress != self._progress:
            self._progress = status.progress
            self._since = now
        return now - self._since
