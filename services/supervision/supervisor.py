"""The supervisor: keeps a set of child processes running until told to stop.

A child that exits is restarted, with growing pauses while it keeps failing. A child whose
heartbeats stop (because it is stopped or hangs) is killed first. SIGTERM and SIGINT drain the
children stage by stage; a second signal stops everything at once. SIGHUP is forwarded, unless it
means that the terminal is closed: then it stops the server too. The children notice by themselves
when the supervisor is gone (`shared.supervisor_link`).
"""

from __future__ import annotations

import logging
import math
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType

from services.processes.terminal import Terminal
from services.supervision.launcher import ChildSpec, LaunchedProcess, Launcher
from services.supervision.managed_child import Limits, ManagedChild, describe_exit
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_USAGE

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PERMANENT = (EXIT_CONFIG, EXIT_USAGE)
_MAX_WAIT_S = 1.0
_SUSPENDED_S = 2.0
"""A wait that was longer than this means that the supervisor was suspended."""
_KILL_AGAIN_S = 2.0


class Supervisor:
    """Runs the children of ``specs``, and those added later, with ``launcher``.

    ``on_ready`` is called once, when all children that announce readiness are ready for the first
    time. ``on_stopping`` is called once, before the first child is told to stop. ``on_tick`` is
    called at least once per second until then. ``on_exit`` is called with each process that has
    exited. ``on_hang_up`` is called on SIGHUP.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        launcher: Launcher,
        *,
        limits: Limits | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_stopping: Callable[[], None] = lambda: None,
        on_tick: Callable[[], None] = lambda: None,
        on_exit: Callable[[ManagedChild], None] = lambda child: None,
        on_hang_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits or Limits()
        self._launcher = launcher
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._on_tick = on_tick
        self._on_exit = on_exit
        self._on_hang_up = on_hang_up
        self.children = [ManagedChild(spec) for spec in specs]
        self._announced = False
        self._end_code: int | None = None
        self._signals: list[int] = []
        self._hang_up = False
        self._terminal = Terminal()
        self._selector = selectors.DefaultSelector()

    # -- for `on_tick` ---------------------------------------------------------

    def end(self, code: int) -> None:
        """Stop the server with an exit code, because it cannot work."""
        self._end_code = code

    def add(self, spec: ChildSpec) -> ManagedChild:
        """Run another child, starting with the next iteration."""
        child = ManagedChild(spec)
        self.children.append(child)
        return child

    def retire(self, child: ManagedChild) -> None:
        """Let ``child`` finish its work and exit permanently. It is gone once it is not in
        ``children``."""
        if child.retired_until is not None:
            return
        child.retired_until = time.monotonic() + self._limits.drain_timeout_s
        if child.process is None:
            self.children.remove(child)
        else:
            child.process.stop()

    def run(self) -> int:
        """Run until told to stop, or until a child cannot start; return the exit code.

        Call it on the main thread. No child is left when it returns or raises.
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
            for child in list(self.children):
                if child.waits_to_start and now >= child.start_at:
                    code = self._start(child, now)
                    if code is not None:
                        return code
            self._wait_for_events(now)
            if self._hang_up:
                self._pass_on_hang_up()
            for child, process in self._running():
                code = self._check(child, process, time.monotonic())
                if code is not None:
                    return code
            self._on_tick()
            if self._end_code is not None:
                return self._end_code
            if not self._announced and self._is_ready():
                self._announced = True
                self._on_ready()
        return None

    def _pass_on_hang_up(self) -> None:
        """Send SIGHUP to the children that handle it: they reload their configuration."""
        self._hang_up = False
        self._on_hang_up()
        for child, process in self._running():
            if child.spec.takes_hang_up and process.state.last_heartbeat_at is not None:
                process.hang_up()

    def _is_ready(self) -> bool:
        return all(child.is_ready for child in self.children if child.spec.announces_ready)

    def _start(self, child: ManagedChild, now: float) -> int | None:
        try:
            child.process = self._launcher.start(child.spec, now)
        except OSError as error:  # out of memory or processes
            return self._schedule_restart(child, f"could not be started ({error.strerror})", now)
        self._selector.register(child.process, selectors.EVENT_READ, child)
        logger.debug("started %s", child.name)
        return None

    def _wait_for_events(self, now: float) -> None:
        """Wait for heartbeats, signals and exits, at most `_MAX_WAIT_S` from ``now`` on."""
        due = [child.start_at - now for child in self.children if child.waits_to_start]
        if self._signals:
            due = []  # nothing starts any more
        for key, _ in self._selector.select(max(0.0, min([_MAX_WAIT_S, *due]))):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.recv(4096)
                continue
            process = key.data.process
            if process is not None and not process.refresh(time.monotonic()):
                self._selector.unregister(process)
        after = time.monotonic()
        if after - now > max(self._limits.silence_s / 2, _SUSPENDED_S):
            for child in self.children:
                child.silence_from = after  # the supervisor itself was suspended, not the child
                if child.retired_until is not None:
                    child.retired_until += after - now

    def _check(self, child: ManagedChild, process: LaunchedProcess, now: float) -> int | None:
        """Kill a silent child, reap a dead one. An exit code means that the server stops."""
        process.refresh(now)
        if process.state.phase == "ready" and child.ready_at is None:
            child.was_ready, child.ready_at = True, now
            logger.debug("%s is ready", child.name)
        code = process.state.exit_code
        if code is None:
            self._stop_if_late(child, process, now)
            return None
        self._reap(child, process)
        if child.retired_until is not None:
            self.children.remove(child)
            return None
        if not child.was_ready and code in PERMANENT:
            reason = process.state.reason or describe_exit(code)
            return self._give_up(child, "cannot start", reason, code, now)
        child.forget_failures(self._limits, now)
        if code == EXIT_OK and process.state.phase in ("ready", "draining"):  # it was told to
            logger.info("%s has exited; restarting it", child.name)
            child.start_at = now
            return None
        return self._schedule_restart(child, describe_exit(code), now)

    def _schedule_restart(self, child: ManagedChild, reason: str, now: float) -> int | None:
        """Schedule the restart. An exit code means that the server stops."""
        child.failures += 1
        if not child.was_ready and child.failures >= self._limits.max_start_failures:
            return self._give_up(child, f"{reason} at every start", reason, EXIT_FAILED, now)
        wait_s = self._limits.pause_s(child.failures)
        if self._has_stand_in(child):  # which has twice the work now, and needs the processor
            wait_s = max(wait_s, self._limits.beside_others_s)
        child.start_at = now + wait_s
        logger.warning("%s %s; restarting it in %.1f s", child.name, reason, wait_s)
        return None

    def _has_stand_in(self, child: ManagedChild) -> bool:
        """Return whether another child takes over the work of ``child`` meanwhile."""
        work = child.spec.work
        return bool(work) and any(
            other.is_ready and other.spec.work == work
            for other in self.children
            if other is not child
        )

    def _give_up(
        self, child: ManagedChild, failing: str, reason: str, code: int, now: float
    ) -> int | None:
        """Start ``child`` no more, or after a long pause. An exit code means that the server
        stops."""
        if child.spec.essential or math.isinf(self._limits.try_again_s):
            child.gave_up, child.exit_code = reason, code
            end = "so the server stops" if child.spec.essential else "and the others continue"
            logger.error("%s %s, %s", child.name, failing, end)
            return code if child.spec.essential else None
        child.failures, child.start_at = 0, now + self._limits.try_again_s
        why = failing if reason in failing else f"{failing} ({reason})"
        logger.error("%s %s; trying again in %.0f s", child.name, why, child.start_at - now)
        return None

    def _stop_if_late(self, child: ManagedChild, process: LaunchedProcess, now: float) -> None:
        """Kill a process that is silent, or that has not exited in time."""
        if child.retired_until is not None and now > child.retired_until:
            logger.error("%s did not exit in time: killed", child.name)
            child.retired_until = now + _KILL_AGAIN_S
            process.stop(at_once=True)
        elif limit_s := child.silent_too_long_s(self._limits, now):
            child.silence_from = now  # do not kill it twice
            logger.error("%s sent no heartbeat for %.0f s: killed", child.name, limit_s)
            process.stop(at_once=True)

    def _running(self) -> list[tuple[ManagedChild, LaunchedProcess]]:
        return [(child, child.process) for child in self.children if child.process]

    def _reap(self, child: ManagedChild, process: LaunchedProcess) -> None:
        try:
            self._selector.unregister(process)
        except KeyError:
            pass  # the child closed its end earlier
        process.close()
        child.process = None
        self._on_exit(child)

    # -- the end ---------------------------------------------------------------

    def _stop(self) -> int:
        """Drain stage by stage, until a second signal; return the exit code."""
        logger.info("stopping")
        self._on_stopping()
        for stage in sorted({child.spec.stop_stage for child in self.children}):
            children = [child for child in self.children if child.spec.stop_stage == stage]
            for child in children:
                child.retired_until = time.monotonic() + self._limits.drain_timeout_s
                if child.process is not None:
                    child.process.stop()
            self._wait_for_exits(children)
            if len(self._signals) > 1:
                logger.warning("stopping immediately")
                return 128 + self._signals[-1]
        logger.info("stopped")
        return EXIT_OK

    def _wait_for_exits(self, children: Sequence[ManagedChild]) -> None:
        while len(self._signals) < 2 and any(child.process for child in children):
            self._wait_for_events(time.monotonic())
            now = time.monotonic()
            for child, process in self._running():
                process.refresh(now)
                if process.state.exit_code is not None:
                    self._reap(child, process)
                else:
                    self._stop_if_late(child, process, now)

    def _kill_all(self) -> None:
        for _, process in self._running():
            process.stop(at_once=True)
        for child, process in self._running():
            process.wait()
            self._reap(child, process)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self._signals.append(number)
        elif number == signal.SIGHUP and not self._terminal.is_closed():
            self._hang_up = True
        elif number == signal.SIGHUP and number not in self._signals:
            # The system and the shell may each send one, which does not mean "immediately".
            self._signals.append(number)
