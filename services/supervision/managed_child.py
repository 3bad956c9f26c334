"""What the supervisor keeps of a child across its restarts, and the limits of its patience."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from services.supervision.launcher import ChildSpec, LaunchedProcess
from shared.exits import EXIT_STUCK


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the supervisor's patience."""

    first_beat_s: float = 60.0  # silence after the start
    loading_s: float = 30.0  # silence after the first beat, until the child is ready
    silence_s: float = 10.0  # silence of a child that is ready
    backoff_s: float = 0.1  # pause before a restart, doubled with each failure in a row
    max_backoff_s: float = 30.0
    beside_others_s: float = 2.0  # pause at least, where another child takes over the work
    forgiving_s: float = 1.0  # of being ready, for which one earlier failure is forgiven
    max_start_failures: int = 5  # of a child that was never ready; then the server ends
    drain_timeout_s: float = 35.0  # of one stage of the stop

    def pause_s(self, failures: int) -> float:
        """Return the pause after so many ``failures`` in a row."""
        return min(self.backoff_s * 2.0 ** min(failures - 1, 30), self.max_backoff_s)


class ManagedChild:
    """The state of a child across its restarts. Times are of ``time.monotonic``."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: LaunchedProcess | None = None
        self.start_at = 0.0
        self.failures = 0
        self.was_ready = False
        self.ready_at: float | None = None
        """When this process became ready."""
        self.excused_at = 0.0  # silence counts from here on
        self.retired_until: float | None = None
        """Once it was told to end for good: when it is killed."""
        self.gave_up: str | None = None
        """Why it is not started any more, in words."""
        self.exit_code = 0
        """The last one."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def joins_as(self) -> str:
        """What routers call it."""
        return self.spec.joins_as or self.spec.name

    @property
    def waits_to_start(self) -> bool:
        return self.process is None and self.gave_up is None

    @property
    def is_ready(self) -> bool:
        return self.process is not None and self.process.state.phase == "ready"

    def forgive(self, limits: Limits, now: float) -> None:
        """Forget failures before a run that was of use. What fails as soon as it is ready waits
        longer each time; what is lost after a while does not."""
        if self.ready_at is not None:
            forgiven = int((now - self.ready_at) / limits.forgiving_s)
            self.failures = max(0, self.failures - forgiven)
            self.ready_at = None

    def silent_too_long_s(self, limits: Limits, now: float) -> float | None:
        """Return the silence that is allowed, if the process has been silent for longer."""
        assert self.process is not None
        state = self.process.state
        if state.last_beat_at is None:
            since, limit_s = state.started_at, limits.first_beat_s
        else:
            since = state.last_beat_at
            limit_s = limits.silence_s if state.phase == "ready" else limits.loading_s
        return limit_s if now - max(since, self.excused_at) > limit_s else None


def describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if code == EXIT_STUCK:
        return "was stuck and ended itself"
    return f"ended with code {code}"
