"""Keeps a set of child processes running until told to stop.

Each child that ends is started again, soon at first and ever later while it keeps
failing. One whose beats stay away (it is stopped, or hangs) is killed first. SIGTERM
and SIGINT drain the children stage by stage; a second signal ends all at once. The
children notice by themselves when the supervisor is gone (`shared.link`).
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
from services.supervisor_output import Output
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_STUCK, EXIT_USAGE

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PERMANENT = (EXIT_CONFIG, EXIT_USAGE)
_TICK_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How patient the supervisor is (seconds).

    A child may be silent for ``first_beat_s`` after its start, then for ``loading_s``
    until it is ready, then for ``silence_s``. Restarts wait ``backoff_s``, doubled
    with each failure in a row up to ``longest_backoff_s``; a child that ran for
    ``steady_s`` has no failures behind it. A child that was never ready gives up the
    whole server after ``first_failures``. A stage of the stop may take ``drain_s``.
    """

    first_beat_s: float = 60.0
    loading_s: float = 30.0
    silence_s: float = 10.0
    backoff_s: float = 0.1
    longest_backoff_s: float = 30.0
    steady_s: float = 60.0
    first_failures: int = 5
    drain_s: float = 35.0


class Supervisor:
    """Runs ``specs``. ``on_ready`` is called once, when the server is first ready;
    ``on_stopping`` once, before the first child is asked to stop."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        output: Output,
        *,
        limits: Limits | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_stopping: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits or Limits()
        self._output = output
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._keepers = [_Keeper(spec) for spec in specs]
        self._announced = False
        self._signals: list[int] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Until the children are told to stop, or cannot start; the exit code.

        To be called on the main thread. No child is left when it returns or raises.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ)
        watched = [*STOP_SIGNALS, signal.SIGCHLD]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            watched.remove(signal.SIGHUP)  # nohup
        before = {number: signal.signal(number, self._take) for number in watched}
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
        """The exit code when the server cannot run; None when it was told to stop."""
        while not self._signals:
            now = time.monotonic()
            for keeper in self._keepers:
                if keeper.child is None and now >= keeper.start_at:
                    code = self._start(keeper, now)
                    if code is not None:
                        return code
            self._listen(now)
            for keeper in self._keepers:
                code = self._look_after(keeper, time.monotonic())
                if code is not None:
                    return code
            if not self._announced and self._is_ready():
                self._announced = True
                self._on_ready()
        return None

    def _is_ready(self) -> bool:
        return all(
            keeper.child is not None and keeper.child.phase == "ready"
            for keeper in self._keepers
            if keeper.spec.announces_ready
        )

    def _start(self, keeper: _Keeper, now: float) -> int | None:
        try:
            keeper.child = Child(keeper.spec, self._output, now)
        except OSError as error:  # no memory, no more processes
            return self._put_off(keeper, f"could not be started ({error.strerror})", now)
        self._selector.register(keeper.child.link, selectors.EVENT_READ, keeper)
        logger.debug("started %s, process %d", keeper.spec.name, keeper.child.pid)
        return None

    def _listen(self, now: float) -> None:
        """Waits for beats, signals and ends, for a tick at most from ``now`` on."""
        due = [keeper.start_at - now for keeper in self._keepers if keeper.child is None]
        for key, _ in self._selector.select(max(0.0, min([_TICK_S, *due]))):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.recv(4096)
                continue
            child = key.data.child
            if child is not None and not child.hear(time.monotonic()):
                self._selector.unregister(child.link)
        after = time.monotonic()
        if after - now > max(self._limits.silence_s / 2, 4 * _TICK_S):
            for keeper in self._keepers:
                keeper.forgiven_at = after  # it was us who stood still, not they

    def _look_after(self, keeper: _Keeper, now: float) -> int | None:
        """Kills a silent child and buries a dead one; an exit code gives the server up."""
        child = keeper.child
        if child is None:
            return None
        if child.phase == "ready" and not keeper.was_ready:
            keeper.was_ready = True
            logger.debug("%s is ready", keeper.spec.name)
        code = child.exit_code()
        if code is None:
            self._kill_if_silent(keeper, child, now)
            return None
        child.hear(now)
        self._bury(keeper)
        name = keeper.spec.name
        if not keeper.was_ready and code in PERMANENT:
            logger.error("%s cannot start, so the server ends", name)
            return code
        if now - child.started_at > self._limits.steady_s:
            keeper.failures = 0
        return self._put_off(keeper, _ending(code), now)

    def _put_off(self, keeper: _Keeper, ending: str, now: float) -> int | None:
        """Says when to start it again; an exit code gives the server up."""
        keeper.failures += 1
        name = keeper.spec.name
        if not keeper.was_ready and keeper.failures >= self._limits.first_failures:
            logger.error("%s %s at every start, so the server ends", name, ending)
            return EXIT_FAILED
        wait_s = min(
            self._limits.backoff_s * 2 ** min(keeper.failures - 1, 30),
            self._limits.longest_backoff_s,
        )
        keeper.start_at = now + wait_s
        logger.warning("%s %s; starting it again in %.1f s", name, ending, wait_s)
        return None

    def _kill_if_silent(self, keeper: _Keeper, child: Child, now: float) -> None:
        limits = self._limits
        if child.last_beat_at is None:
            since, limit_s = child.started_at, limits.first_beat_s
        else:
            since = child.last_beat_at
            limit_s = limits.silence_s if child.phase == "ready" else limits.loading_s
        since = max(since, keeper.forgiven_at)
        if now - since > limit_s:
            keeper.forgiven_at = now  # once is enough
            logger.error("%s gave no sign of life for %.0f s: killed", keeper.spec.name, limit_s)
            child.signal(signal.SIGKILL)

    def _bury(self, keeper: _Keeper) -> None:
        child = keeper.child
        assert child is not None
        try:
            self._selector.unregister(child.link)
        except KeyError:
            pass  # it had closed its end before
        child.close()
        keeper.child = None

    # -- the end ---------------------------------------------------------------

    def _stop(self) -> int:
        """Drains stage by stage; a signal on top of the first ends the waiting."""
        logger.info("stopping")
        self._on_stopping()
        for stage in sorted({keeper.spec.stop_stage for keeper in self._keepers}):
            keepers = [one for one in self._keepers if one.spec.stop_stage == stage]
            for keeper in keepers:
                if keeper.child is not None:
                    keeper.child.signal(signal.SIGTERM)
            self._await(keepers, time.monotonic() + self._limits.drain_s)
            if len(self._signals) > 1:
                logger.warning("stopping at once")
                return 128 + self._signals[-1]
        logger.info("stopped")
        return EXIT_OK

    def _await(self, keepers: Sequence[_Keeper], deadline: float) -> None:
        while len(self._signals) < 2 and any(keeper.child for keeper in keepers):
            now = time.monotonic()
            self._listen(now)
            for keeper in self._keepers:
                child = keeper.child
                if child is None:
                    continue
                if child.exit_code() is not None:
                    self._bury(keeper)
                elif now > deadline and keeper in keepers:
                    logger.error("%s did not stop in time: killed", keeper.spec.name)
                    child.signal(signal.SIGKILL)
                    deadline = now + _TICK_S * 4
                else:
                    self._kill_if_silent(keeper, child, now)

    def _kill_all(self) -> None:
        running = [keeper for keeper in self._keepers if keeper.child is not None]
        for keeper in running:
            assert keeper.child is not None
            keeper.child.signal(signal.SIGKILL)
        for keeper in running:
            assert keeper.child is not None
            keeper.child.wait()
            self._bury(keeper)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS:
            self._signals.append(number)


class _Keeper:
    """What is remembered of a child over its restarts."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.start_at = 0.0
        self.failures = 0
        self.was_ready = False
        self.forgiven_at = 0.0


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if code == EXIT_STUCK:
        return "was stuck and ended itself"
    return f"ended with code {code}"
