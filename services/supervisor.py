"""The supervisor: it keeps a set of child processes running until told to stop.

A child that ends is restarted, with growing pauses while it keeps failing. A child whose
beats stop (it is stopped, or hangs) is killed first. SIGTERM and SIGINT drain the children
stage by stage; a second signal ends all at once. SIGHUP is passed on, unless it says that the
terminal is closed: then it ends the server too. The children notice by themselves when the
supervisor is gone (`shared.supervisor_link`).
"""

from __future__ import annotations

import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from services.supervisor_child import Child, ChildSpec
from services.supervisor_output import LogCollector
from services.terminal import Terminal
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_STUCK, EXIT_USAGE

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PERMANENT = (EXIT_CONFIG, EXIT_USAGE)
_MAX_WAIT_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the supervisor's patience."""

    first_beat_s: float = 60.0  # silence after the start
    loading_s: float = 30.0  # silence after the first beat, until the child is ready
    silence_s: float = 10.0  # silence of a child that is ready
    backoff_s: float = 0.1  # pause before a restart, doubled with each failure in a row
    max_backoff_s: float = 30.0
    stable_after_s: float = 60.0  # a run of this length forgives earlier failures
    max_start_failures: int = 5  # of a child that was never ready; then the server ends
    drain_timeout_s: float = 35.0  # of one stage of the stop


class Supervisor:
    """Runs the children of ``specs``.

    ``on_ready`` is called once, when all that announce it are ready for the first time.
    ``on_stopping`` is called once, before the first child is told to stop. ``on_turn`` is called
    several times a second.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        output: LogCollector,
        *,
        limits: Limits | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_stopping: Callable[[], None] = lambda: None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits or Limits()
        self._output = output
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._on_turn = on_turn
        self._children = [_ManagedChild(spec) for spec in specs]
        self._announced = False
        self._signals: list[int] = []
        self._hang_up = False
        self._terminal = Terminal()
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run until told to stop, or until a child cannot start; return the exit code.

        To be called on the main thread. No child is left when it returns or raises.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ)
        watched = [*STOP_SIGNALS, signal.SIGCHLD]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            watched.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in watched}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            code = self._keep_running()
            return code if code is not None else self._stop()
        finally:
            self._kill_all()
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            ours.close()
            theirs.close()

    def _keep_running(self) -> int | None:
        """Run until told to stop (None), or until the server cannot run (its exit code)."""
        while not self._signals:
            now = time.monotonic()
            for managed in self._children:
                if managed.child is None and now >= managed.start_at:
                    code = self._start(managed, now)
                    if code is not None:
                        return code
            self._wait_for_events(now)
            self._on_turn()
            if self._hang_up:
                self._pass_on_hang_up()
            for managed, child in self._running():
                code = self._check_child(managed, child, time.monotonic())
                if code is not None:
                    return code
            if not self._announced and self._is_ready():
                self._announced = True
                self._on_ready()
        return None

    def _pass_on_hang_up(self) -> None:
        """Send SIGHUP to the children that take it: they read their configuration again."""
        self._hang_up = False
        for managed, child in self._running():
            if managed.spec.takes_hang_up and child.last_beat_at is not None:
                child.hang_up()

    def _is_ready(self) -> bool:
        return all(
            managed.child is not None and managed.child.phase == "ready"
            for managed in self._children
            if managed.spec.announces_ready
        )

    def _start(self, managed: _ManagedChild, now: float) -> int | None:
        try:
            managed.child = Child(managed.spec, self._output, now)
        except OSError as error:  # no memory, no more processes
            return self._schedule_restart(managed, f"could not be started ({error.strerror})", now)
        self._selector.register(managed.child.link, selectors.EVENT_READ, managed)
        logger.debug("started %s, process %d", managed.spec.name, managed.child.pid)
        return None

    def _wait_for_events(self, now: float) -> None:
        """Wait for beats, signals and exits, at most `_MAX_WAIT_S` from ``now`` on."""
        due = [managed.start_at - now for managed in self._children if managed.child is None]
        for key, _ in self._selector.select(max(0.0, min([_MAX_WAIT_S, *due]))):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.recv(4096)
                continue
            child = key.data.child
            if child is not None and not child.read_beats(time.monotonic()):
                self._selector.unregister(child.link)
        after = time.monotonic()
        if after - now > max(self._limits.silence_s / 2, 4 * _MAX_WAIT_S):
            for managed in self._children:
                managed.excused_at = after  # the supervisor itself was stopped, not the child

    def _check_child(self, managed: _ManagedChild, child: Child, now: float) -> int | None:
        """Kill a silent child, reap a dead one. An exit code means that the server ends."""
        if child.phase == "ready" and not managed.was_ready:
            managed.was_ready = True
            logger.debug("%s is ready", managed.spec.name)
        code = child.exit_code()
        if code is None:
            self._kill_if_silent(managed, child, now)
            return None
        child.read_beats(now)
        self._reap(managed, child)
        name = managed.spec.name
        if not managed.was_ready and code in PERMANENT:
            logger.error("%s cannot start, so the server ends", name)
            return code
        if now - child.started_at > self._limits.stable_after_s:
            managed.failures = 0
        return self._schedule_restart(managed, _describe_exit(code), now)

    def _schedule_restart(self, managed: _ManagedChild, reason: str, now: float) -> int | None:
        """Set the time of the next start. An exit code means that the server ends."""
        managed.failures += 1
        name = managed.spec.name
        if not managed.was_ready and managed.failures >= self._limits.max_start_failures:
            logger.error("%s %s at every start, so the server ends", name, reason)
            return EXIT_FAILED
        wait_s = min(
            self._limits.backoff_s * 2 ** min(managed.failures - 1, 30), self._limits.max_backoff_s
        )
        managed.start_at = now + wait_s
        logger.warning("%s %s; starting it again in %.1f s", name, reason, wait_s)
        return None

    def _kill_if_silent(self, managed: _ManagedChild, child: Child, now: float) -> None:
        limits = self._limits
        if child.last_beat_at is None:
            since, limit_s = child.started_at, limits.first_beat_s
        else:
            since = child.last_beat_at
            limit_s = limits.silence_s if child.phase == "ready" else limits.loading_s
        since = max(since, managed.excused_at)
        if now - since > limit_s:
            managed.excused_at = now  # do not kill it twice
            logger.error("%s gave no sign of life for %.0f s: killed", managed.spec.name, limit_s)
            child.signal(signal.SIGKILL)

    def _running(self) -> list[tuple[_ManagedChild, Child]]:
        return [(managed, managed.child) for managed in self._children if managed.child]

    def _reap(self, managed: _ManagedChild, child: Child) -> None:
        try:
            self._selector.unregister(child.link)
        except KeyError:
            pass  # the child closed its end before
        child.close()
        managed.child = None

    # -- the end ---------------------------------------------------------------

    def _stop(self) -> int:
        """Drain stage by stage, until a second signal; return the exit code."""
        logger.info("stopping")
        self._on_stopping()
        for stage in sorted({managed.spec.stop_stage for managed in self._children}):
            children = [one for one in self._children if one.spec.stop_stage == stage]
            for managed, child in self._running():
                if managed in children:
                    child.signal(signal.SIGTERM)
            self._wait_for_exits(children, time.monotonic() + self._limits.drain_timeout_s)
            if len(self._signals) > 1:
                logger.warning("stopping at once")
                return 128 + self._signals[-1]
        logger.info("stopped")
        return EXIT_OK

    def _wait_for_exits(self, children: Sequence[_ManagedChild], deadline: float) -> None:
        while len(self._signals) < 2 and any(managed.child for managed in children):
            now = time.monotonic()
            self._wait_for_events(now)
            for managed, child in self._running():
                if child.exit_code() is not None:
                    self._reap(managed, child)
                elif now > deadline and managed in children:
                    logger.error("%s did not stop in time: killed", managed.spec.name)
                    child.signal(signal.SIGKILL)
                    deadline = now + _MAX_WAIT_S * 4
                else:
                    self._kill_if_silent(managed, child, now)

    def _kill_all(self) -> None:
        for _, child in self._running():
            child.signal(signal.SIGKILL)
        for managed, child in self._running():
            child.wait()
            self._reap(managed, child)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self._signals.append(number)
        elif number == signal.SIGHUP and not self._terminal.is_closed():
            self._hang_up = True
        elif number == signal.SIGHUP and number not in self._signals:
            # Both the system and the shell send one, which does not mean "at once".
            self._signals.append(number)


class _ManagedChild:
    """The state of a child across its restarts. Times are of ``time.monotonic``."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.start_at = 0.0
        self.failures = 0
        self.was_ready = False
        self.excused_at = 0.0  # silence counts from here on


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if code == EXIT_STUCK:
        return "was stuck and ended itself"
    return f"ended with code {code}"
