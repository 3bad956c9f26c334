"""Processes on this machine, as children of the supervisor."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from services.supervision.launcher import ChildSpec, ProcessState
from services.supervision.output import LogCollector
from shared.environment import HUB_TOKENS, environment_without
from shared.supervisor_link import LINK_VARIABLE, LineReader, LineWriter

logger = logging.getLogger(__name__)

SPARE_RETRY_S = 60.0


class LocalLauncher:
    """A `Launcher` of child processes, whose output goes to ``output``.

    It starts a spare process ``spare_after_s`` after the start of a child that a spare may become;
    0 means never. A child that keeps crashing therefore gets no spare."""

    def __init__(self, output: LogCollector, spare_after_s: float = 0.0) -> None:
        self._output = output
        self._spare_after_s = spare_after_s
        self._spare: LocalProcess | None = None
        self._model: ChildSpec | None = None  # the last child for which a spare can be used
        self._spare_at = 0.0

    def start(self, spec: ChildSpec, now: float) -> LocalProcess:
        if not spec.spare:
            return LocalProcess(spec, self._output, now)
        self._model, self._spare_at = spec, now + self._spare_after_s
        spare, self._spare = self._spare, None
        if spare is not None and spare.become(spec, now):
            return spare
        if spare is not None:
            spare.end()
        return LocalProcess(spec, self._output, now)

    @property
    def spare_pid(self) -> int | None:
        return None if self._spare is None else self._spare.pid

    def keep_spare(self, now: float) -> None:
        """Start a spare process if it is due."""
        if self._spare is not None and not self._spare.is_alive():
            logger.warning("the spare process has exited")
            self._spare.end()
            self._spare, self._spare_at = None, now + SPARE_RETRY_S
        wanted = self._model is not None and self._spare_after_s > 0
        if wanted and self._spare is None and now >= self._spare_at:
            assert self._model is not None
            spec = replace(
                self._model,
                name="spare",
                command=self._model.spare,
                environment=environment_without(HUB_TOKENS, self._model.environment),
            )
            try:
                self._spare = LocalProcess(spec, self._output, now)
            except OSError as error:  # out of memory or processes
                logger.warning("cannot start a spare process (%s)", error.strerror)
                self._spare_at = now + SPARE_RETRY_S

    def close(self) -> None:
        """Stop the spare process."""
        if self._spare is not None:
            self._spare.end()


class LocalProcess:
    """A `LaunchedProcess` that is a child of this one."""

    def __init__(self, spec: ChildSpec, output: LogCollector, now: float) -> None:
        self.spec = spec
        self.state = ProcessState(started_at=now)
        self._link, child_end = socket.socketpair()
        self._link.setblocking(False)
        self._reader, self._writer = LineReader(), LineWriter(self._link)
        self._messages: list[Mapping[str, Any]] = []
        with child_end:
            descriptors = {**spec.descriptors, LINK_VARIABLE: child_end.fileno()}
            # Its own process group: Ctrl-C reaches only the supervisor, which then stops the
            # children in order.
            self._process = subprocess.Popen(
                spec.command,
                env={
                    **environment_without(spec.hidden_variables),
                    **spec.environment,
                    **{name: str(number) for name, number in descriptors.items()},
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(descriptors.values()),
                process_group=0,
            )
        assert self._process.stdout is not None
        try:
            output.follow(self._process.stdout, lambda: self.spec.name)
        except OSError:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._link.fileno()

    def refresh(self, now: float) -> bool:
        if self.state.exit_code is None:
            self.state.exit_code = self._process.poll()
            if self.state.exit_code is not None:
                self._end_group()
        self._writer.flush()
        try:
            while data := self._link.recv(self._reader.MAX_LINE_BYTES):
                self.state.last_heartbeat_at = now  # any message proves that the child is alive
                for line in self._reader.lines(data):
                    self._on_line(line)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def take_messages(self) -> list[Mapping[str, Any]]:
        taken, self._messages = self._messages, []
        return taken

    def send(self, message: Mapping[str, Any]) -> bool:
        return self._writer.write(message)

    def stop(self, *, at_once: bool = False) -> None:
        if self._process.poll() is None:
            self._signal_group(signal.SIGKILL if at_once else self.spec.stop_signal)
            self._signal_group(signal.SIGCONT)  # a stopped process handles no other signal

    def hang_up(self) -> None:
        self._process.send_signal(signal.SIGHUP)  # only to the child

    def wait(self) -> None:
        self._process.wait()
        self._end_group()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def become(self, spec: ChildSpec, now: float) -> bool:
        """Turn this spare process into the child of ``spec``; return False if it has exited."""
        self.spec, self.state = spec, ProcessState(started_at=now)
        order = {
            "arguments": spec.command[len(spec.spare) :],
            "environment": dict(spec.environment),
        }
        if not self.is_alive():
            return False
        self._signal_group(signal.SIGCONT)  # it may have been stopped
        return self.send(order)

    def end(self) -> None:
        """Kill the process, and wait until it has exited."""
        self.stop(at_once=True)
        self.wait()
        self.close()

    def _end_group(self) -> None:
        """Kill the rest of its process group, such as a stopped rank."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        # It may have just exited. macOS reports "not permitted" for a zombie.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        self._link.close()

    def _on_line(self, line: Mapping[str, Any]) -> None:
        if isinstance(phase := line.get("phase"), str):
            self.state.phase, self.state.facts = phase, line
            self.state.reason = str(line.get("reason", self.state.reason))
        else:
            self._messages.append(line)
