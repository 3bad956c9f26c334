"""The health of a group: a rank that is dead, stopped, stuck or wrong ends all of them.

Each rank has a thread that sends heartbeats, undisturbed by computation. A collective never returns
if a rank is missing, so rank 0's thread, and the keepers of the others
(`services.processes.rank_keeper`), end the processes. The supervisor then restarts the group, and
the router resubmits its requests.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from engine.parallel.progress import StepProgress, Steps
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_STUCK
from shared.supervisor_link import LineReader, LineWriter, SupervisorLink

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 0.5
SILENCE_S = 5.0
"""Max silence of a rank that serves."""
LOADING_SILENCE_S = 60.0
"""Max silence of a rank that loads: imports and reading weights block the interpreter."""
LAG_S = 10.0
"""Max time that a rank may lag behind a plan that rank 0 has begun, or whose result it has."""
HANGING_UP_S = 0.05
"""A process that exits closes its link first; its exit code is more informative."""
CLOSING_S = 3.0
"""Max time for a keeper to end."""
SSH_FAILED = 255
"""ssh's exit code if it could not connect."""
SUSPENDED_S = 1.0
"""A watch that runs this much too late was suspended itself, and the others perhaps too. That time
does not count."""


@dataclass(frozen=True)
class KeptRank:
    """Another rank, as rank 0 sees it: the connection to its keeper."""

    rank: int
    link: socket.socket
    process: subprocess.Popen[bytes] | None = None
    """The keeper, or ssh; None if the keeper has connected to this process."""
    host: str = ""
    """The name of its machine for ssh, empty if it needs none."""

    def ended(self, code: int | None) -> str:
        """Describe the end of the rank. ``code`` is what its keeper has reported."""
        name = f"rank {self.rank}" + f" on {self.host}" * bool(self.host)
        if code is None and self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(HANGING_UP_S)
            if self.host and code == SSH_FAILED:
                return f"{name} could not be started, or the connection was lost (ssh)"
        if code is None:
            return f"{name} has closed its link"
        return f"{name} has exited ({signal.Signals(-code).name if code < 0 else f'code {code}'})"

    def end(self) -> None:
        """Close the connection, whereupon the keeper kills the rank, even if it is stopped."""
        self.link.close()
        if self.process is not None:
            try:
                self.process.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class GroupWatch(threading.Thread):
    """Rank 0's watch over the others.

    ``on_failed`` is called once, with a reason and an exit code. The process should then exit; the
    other ranks have already been killed."""

    def __init__(
        self,
        ranks: Sequence[KeptRank],
        progress: StepProgress,
        on_failed: Callable[[str, int], None],
        *,
        silence_s: float = SILENCE_S,
        lag_s: float = LAG_S,
    ) -> None:
        super().__init__(name="ranks", daemon=True)
        self._ranks = [_WatchedRank(rank, progress, silence_s, lag_s) for rank in ranks]
        self._on_failed = on_failed

        self._stopping = False

    def stop(self) -> None:
        """Stop the other ranks as planned, and return when they have exited."""
        self._stopping = True
        self.join()

    def run(self) -> None:
        failure: tuple[str, int] | None = "the group is not watched", EXIT_FAILED
        try:
            failure = self._watch()
        except Exception:
            logger.exception("the health check of the ranks failed")
        for each in self._ranks:
            each.kept.end()
        if failure is not None:
            self._on_failed(*failure)

    def _watch(self) -> tuple[str, int] | None:
        """Return the reason why the group must end, and the exit code; None if it was asked to
        stop."""
        with selectors.DefaultSelector() as selector:
            for each in self._ranks:
                selector.register(each.kept.link, selectors.EVENT_READ, each)
            next_heartbeat = looked_at = time.monotonic()
            while not self._stopping:
                for key, _ in selector.select(max(0.0, next_heartbeat - time.monotonic())):
                    if not key.data.receive():
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if (suspended_s := now - looked_at - HEARTBEAT_INTERVAL_S) > SUSPENDED_S:
                    for each in self._ranks:
                        each.exclude(suspended_s)
                looked_at = now
                if now >= next_heartbeat:
                    next_heartbeat = now + HEARTBEAT_INTERVAL_S
                    for each in self._ranks:
                        each.heartbeat()
                for each in self._ranks:
                    if (found := each.failure(now)) is not None:
                        return found
        return None


class _WatchedRank:
    """Rank 0's knowledge of another rank. Times are from ``time.monotonic``."""

    def __init__(
        self, kept: KeptRank, progress: StepProgress, silence_s: float, lag_s: float
    ) -> None:
        self.kept = kept
        self._progress = progress
        self._silence_s, self._lag_s = silence_s, lag_s
        self._reader, self._writer = LineReader(), LineWriter(kept.link)
        self._heard_at = time.monotonic()
        self._phase, self._reason = "", ""
        self._exit: int | None = None
        self._steps = Steps()
        self._goal, self._goal_since = Steps(), time.monotonic()
        self._hung_up = False

    def receive(self) -> bool:
        """Read the messages of the rank. Return False once it has closed its link."""
        try:
            data = self.kept.link.recv(LineReader.MAX_LINE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        self._hung_up = not data
        self._heard_at = time.monotonic()
        for line in self._reader.lines(data):
            self._phase = str(line.get("phase", self._phase))
            self._reason = str(line.get("reason", self._reason))
            self._exit = line.get("exit", self._exit)
            numbers = [line.get(name, 0) for name in Steps._fields]
            self._steps = Steps(*map(int, numbers))
        return not self._hung_up

    def heartbeat(self) -> None:
        self._writer.write({"alive": True})

    def exclude(self, suspended_s: float) -> None:
        self._heard_at += suspended_s
        self._goal_since += suspended_s

    def failure(self, now: float) -> tuple[str, int] | None:
        """Return the reason why the group must end, and the exit code."""
        name = f"rank {self.kept.rank}"
        if self._exit == EXIT_CONFIG and self._reason:
            return self._reason, EXIT_CONFIG
        if self._exit is not None or self._hung_up:
            return self.kept.ended(self._exit), EXIT_FAILED
        limit_s = self._silence_s if self._phase == "ready" else LOADING_SILENCE_S
        if now - self._heard_at > limit_s:
            return f"{name} sent no heartbeat for {limit_s:.0f} s", EXIT_FAILED
        if self._progress.differs(self._steps):
            return f"{name} computed something different up to plan {self._steps.done}", EXIT_FAILED
        if self._steps.begun >= self._goal.begun and self._steps.done >= self._goal.done:
            self._goal, self._goal_since = self._progress.steps, now
        elif self._phase == "ready" and now - self._goal_since > self._lag_s:
            return f"{name} is stuck after plan {self._steps.done}", EXIT_STUCK
        return None


class RankHeartbeats(threading.Thread):
    """The heartbeats of a rank other than 0. The process exits with its keeper, which watches rank
    0."""

    def __init__(self, link: SupervisorLink, progress: StepProgress) -> None:
        super().__init__(name="heartbeats", daemon=True)
        self._link, self._progress = link, progress
        self.phase = "loading"

    def run(self) -> None:
        self._link.watch(lambda: os._exit(EXIT_OK))
        while True:
            self.send()
            time.sleep(HEARTBEAT_INTERVAL_S)

    def send(self, **more: object) -> None:
        self._link.heartbeat(self.phase, **self._progress.steps._asdict(), **more)
