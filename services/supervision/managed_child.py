"""The state of a child across its restarts, and the supervisor's time limits."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass

from services.supervision.launcher import ChildSpec, LaunchedProcess
from shared.exits import EXIT_STUCK


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The supervisor's time limits."""

    first_heartbeat_s: float = 60.0  # max silence after the start
    loading_s: float = 30.0  # max silence after the first heartbeat, until the child is ready
    silence_s: float = 10.0  # max silence of a ready child
    backoff_s: float = 0.1  # pause before a restart, doubled with each consecutive failure
    max_backoff_s: float = 30.0
    beside_others_s: float = 2.0  # min pause if another child takes over the work
    forgiving_s: float = 1.0  # time being ready after which one earlier failure is forgotten
    max_start_failures: int = (
        5  # max failures of a child that was never ready; then the server exits
    )
    try_again_s: float = math.inf  # pause of a child that cannot start, if others continue
    drain_timeout_s: float = 35.0  # max duration of one stage of the shutdown

    def pause_s(self, failures: int) -> float:
        """Return the pause after ``failures`` in a row."""
        return min(self.backoff_s * 2.0 ** min(failures - 1, 30), self.max_backoff_s)


class ManagedChild:
    """The state of a child across its restarts. Times are from ``time.monotonic``."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: LaunchedProcess | None = None
        self.start_at = 0.0
        self.failures = 0
        self.was_ready = False
        self.ready_at: float | None = None
        """When this process became ready."""
        self.silence_from = 0.0  # silence is measured from here
        self.retired_until: float | None = None
        """The time at which it will be killed, after a request to exit permanently."""
        self.gave_up: str | None = None
        """The reason why it is not started any more, in words."""
        self.exit_code = 0
        """The last exit code."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def joins_as(self) -> str:
        """The name in messages to routers."""
        return self.spec.joins_as or self.spec.name

    @property
    def waits_to_start(self) -> bool:
        return self.process is None and self.gave_up is None

    @property
    def is_ready(self) -> bool:
        return self.process is not None and self.process.state.phase == "ready"

    def forget_failures(self, limits: Limits, now: float) -> None:
        """Forget failures before a useful run. A child that fails as soon as it is ready waits
        longer each time; a child that is lost after a while does not."""
        if self.ready_at is not None:
            forgotten = int((now - self.ready_at) / limits.forgiving_s)
            self.failures = max(0, self.failures - forgotten)
            self.ready_at = None

    def silent_too_long_s(self, limits: Limits, now: float) -> float | None:
        """Return the allowed silence if the process has been silent for longer."""
        assert self.process is not None
        state = self.process.state
        if state.last_heartbeat_at is None:
            since, limit_s = state.started_at, limits.first_heartbeat_s
        else:
            since = state.last_heartbeat_at
            limit_s = limits.silence_s if state.phase == "ready" else limits.loading_s
        return limit_s if now - max(since, self.silence_from) > limit_s else None


def describe_exit(code: int) -> str:
    if code < 0:
        names = {int(each): each.name for each in signal.Signals}  # those of Linux have gaps
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    if code == EXIT_STUCK:
        return "made no progress and exited"
    return f"exited with code {code}"
