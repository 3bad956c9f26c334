"""The health of a group: a rank that is dead, stopped, stuck or wrong ends all of them.

Each rank has a thread that beats over a pair of sockets, and that nothing computed delays. A
collective never ends when a rank is missing, so these threads end the processes. After that the
supervisor starts the group again, and the router submits its requests once more.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.parallel.progress import StepProgress, Steps
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_STUCK
from shared.supervisor_link import LineReader, LineWriter, SupervisorLink

logger = logging.getLogger(__name__)

BEAT_INTERVAL_S = 0.5
SILENCE_S = 5.0
"""The longest silence of a rank that serves."""
LOADING_SILENCE_S = 60.0
"""The longest silence of one that loads: imports and reading weights hold the interpreter."""
LAG_S = 10.0
"""How long a rank may stay behind a plan that rank 0 has begun, or has the result of."""
HANGING_UP_S = 0.05
"""A process that ends hangs up first; its exit code says more."""
ASLEEP_S = 1.0
"""A watch that looks so much later than it should was stopped itself, and the others perhaps too.
What it missed does not count."""


class RankProcess(Protocol):
    """The process of another rank, as rank 0 sees it."""

    rank: int
    link: socket.socket

    def exit_code(self) -> int | None:
        """Return the exit code, None while it runs."""

    def ended(self, code: int) -> str:
        """Describe an exit code."""

    def kill(self) -> None:
        """End the process at once, also if it is stopped, and wait until it has."""


class GroupWatch(threading.Thread):
    """Rank 0's watch over the others.

    ``on_failed`` is called, once, with a reason and an exit code. Then the process should end; the
    other ranks have been killed by then."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
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
        """End the other ranks as planned, and return when they have ended."""
        self._stopping = True
        self.join()

    def run(self) -> None:
        failure: tuple[str, int] | None = "the group is not watched", EXIT_FAILED
        try:
            failure = self._watch()
        except Exception:
            logger.exception("the watch over the ranks failed")
        for each in self._ranks:
            each.process.kill()
        if failure is not None:
            self._on_failed(*failure)

    def _watch(self) -> tuple[str, int] | None:
        """Return why the group has to end, and the exit code; None once it is told to."""
        with selectors.DefaultSelector() as selector:
            for each in self._ranks:
                selector.register(each.process.link, selectors.EVENT_READ, each)
            next_beat = looked_at = time.monotonic()
            while not self._stopping:
                for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                    if not key.data.receive():
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if (asleep_s := now - looked_at - BEAT_INTERVAL_S) > ASLEEP_S:
                    for each in self._ranks:
                        each.forgive(asleep_s)
                looked_at = now
                if now >= next_beat:
                    next_beat = now + BEAT_INTERVAL_S
                    for each in self._ranks:
                        each.beat()
                for each in self._ranks:
                    if (found := each.failure(now)) is not None:
                        return found
        return None


class _WatchedRank:
    """What rank 0 knows of another rank. Times are of ``time.monotonic``."""

    def __init__(
        self, process: RankProcess, progress: StepProgress, silence_s: float, lag_s: float
    ) -> None:
        self.process = process
        self._progress = progress
        self._silence_s, self._lag_s = silence_s, lag_s
        self._reader, self._writer = LineReader(), LineWriter(process.link)
        self._heard_at = time.monotonic()
        self._phase, self._reason = "", ""
        self._exit: int | None = None
        self._steps = Steps()
        self._goal, self._goal_since = Steps(), time.monotonic()
        self._hung_up = False

    def receive(self) -> bool:
        """Read what the rank has said. Return False once it has hung up."""
        try:
            data = self.process.link.recv(LineReader.MAX_LINE_BYTES, socket.MSG_DONTWAIT)
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

    def beat(self) -> None:
        self._writer.write({"alive": True})

    def forgive(self, asleep_s: float) -> None:
        self._heard_at += asleep_s
        self._goal_since += asleep_s

    def failure(self, now: float) -> tuple[str, int] | None:
        """Return why the group has to end, and the exit code."""
        name, code = f"rank {self.process.rank}", self.process.exit_code()
        if self._hung_up and code is None:
            time.sleep(HANGING_UP_S)
            code = self.process.exit_code()
        if code is None and self._hung_up:
            code = self._exit  # as its keeper has said
        if code is not None or self._hung_up:
            if code == EXIT_CONFIG and self._reason:
                return self._reason, EXIT_CONFIG
            how = "has hung up" if code is None else self.process.ended(code)
            return f"{name} {how}", EXIT_FAILED
        limit_s = self._silence_s if self._phase == "ready" else LOADING_SILENCE_S
        if now - self._heard_at > limit_s:
            return f"{name} gave no sign of life for {limit_s:.0f} s", EXIT_FAILED
        if self._progress.differs(self._steps):
            return f"{name} computed something else up to plan {self._steps.done}", EXIT_FAILED
        if self._steps.begun >= self._goal.begun and self._steps.done >= self._goal.done:
            self._goal, self._goal_since = self._progress.steps, now
        elif self._phase == "ready" and now - self._goal_since > self._lag_s:
            return f"{name} is stuck after plan {self._steps.done}", EXIT_STUCK
        return None


class LeaderWatch(threading.Thread):
    """The watch of another rank over rank 0, and its own beats.

    When rank 0 is gone the process ends. One that says nothing more is killed first: its
    supervisor starts the group again then, and would wait for longer."""

    def __init__(self, link: SupervisorLink, leader: int | None, progress: StepProgress) -> None:
        """``leader`` is the process of rank 0, None if it is on another machine."""
        super().__init__(name="leader", daemon=True)
        self._link, self._leader, self._progress = link, leader, progress
        self._heard_at = time.monotonic()
        self.phase = "loading"

    def run(self) -> None:
        self._link.watch(lambda: os._exit(EXIT_OK), self._on_message)
        while True:
            started = time.monotonic()
            self.beat()
            time.sleep(BEAT_INTERVAL_S)
            now = time.monotonic()
            if (asleep_s := now - started - BEAT_INTERVAL_S) > ASLEEP_S:
                self._heard_at += asleep_s
            limit_s = SILENCE_S if self.phase == "ready" else LOADING_SILENCE_S
            if now - self._heard_at > limit_s:
                here = os.getppid() == self._leader
                what = "killed" if here else "this rank ends"
                logger.error("rank 0 gave no sign of life for %.0f s: %s", limit_s, what)
                if here:
                    assert self._leader is not None
                    os.kill(self._leader, signal.SIGKILL)
                os._exit(EXIT_STUCK)

    def beat(self, **more: object) -> None:
        self._link.beat(self.phase, **self._progress.steps._asdict(), **more)

    def _on_message(self, message: Mapping[str, Any]) -> None:
        self._heard_at = time.monotonic()
