"""A `Launcher` that lets Ray place the processes that specify the resources they need."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from services.supervision.launcher import (
    ChildSpec,
    LaunchedProcess,
    Launcher,
    MachineNeeds,
    ProcessState,
)
from services.supervision.output import LogCollector
from services.supervision.ray.host import EngineHost
from shared.supervisor_link import LineReader

logger = logging.getLogger(__name__)

PLACING = b'{"phase": "placing"}\n'
"""The phase reported for an engine that Ray has not placed yet."""
LOST = b'\n{"lost": true}\n' + PLACING
"""The text reported when an engine is lost, possibly in the middle of a line."""
_TURN_S = 1.0
_AGAIN_S = 0.2
_END_S = 10.0


class RayLauncher:
    """Starts actors for engines; ``local`` starts all other processes."""

    def __init__(self, local: Launcher, output: LogCollector, keys: Mapping[str, str]) -> None:
        self._local, self._output, self._keys = local, output, keys

    def start(self, spec: ChildSpec, now: float) -> LaunchedProcess:
        if spec.place is None:
            return self._local.start(spec, now)
        try:
            return RayProcess(spec, spec.place, self._keys, self._output, now)
        except RayError as error:
            raise OSError(0, f"Ray: {error}") from None


class RayProcess:
    """A `LaunchedProcess` that is an engine with its actor. If the actor or its machine is lost,
    Ray restarts it where there is room: the process does not end."""

    def __init__(
        self,
        spec: ChildSpec,
        place: MachineNeeds,
        keys: Mapping[str, str],
        output: LogCollector,
        now: float,
    ) -> None:
        self.spec = spec
        self.state = ProcessState(started_at=now)
        self._group = _reserve(place)
        options = _options(place, self._group)
        host = ray.remote(EngineHost).options(max_restarts=-1, max_concurrency=4, **options)
        self._actor = host.remote(spec.name, list(spec.command), dict(keys))
        self._said, self._to_us = socket.socketpair()
        self._said.setblocking(False)
        self._reader = LineReader()
        self._messages: list[Mapping[str, Any]] = []
        self._exit_code: int | None = None
        self._is_placed, self._ends = False, False
        readable, self._log = os.pipe()
        output.follow(os.fdopen(readable, "rb"), lambda: spec.name)
        self._follower = threading.Thread(target=self._follow, name=spec.name, daemon=True)
        self._follower.start()

    def fileno(self) -> int:
        return self._said.fileno()

    def refresh(self, now: float) -> bool:
        with suppress(BlockingIOError):
            while data := self._said.recv(self._reader.MAX_LINE_BYTES):
                self.state.last_heartbeat_at = now
                for line in self._reader.lines(data):
                    self._on_line(line)
            self.state.exit_code = self._exit_code
            return False
        return True

    def take_messages(self) -> list[Mapping[str, Any]]:
        taken, self._messages = self._messages, []
        return taken

    def send(self, message: Mapping[str, Any]) -> bool:
        self._actor.write.remote(json.dumps(message).encode() + b"\n")
        return True

    def stop(self, *, at_once: bool = False) -> None:
        self._ends = True
        if at_once or not self._is_placed:
            ray.kill(self._actor)  # the engine exits with it
        else:
            self._actor.signal.remote(int(self.spec.stop_signal), True)

    def hang_up(self) -> None:
        self._actor.signal.remote(int(signal.SIGHUP), False)

    def wait(self) -> None:
        self._follower.join(_END_S)

    def close(self) -> None:
        with suppress(RayError):
            ray.kill(self._actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._said.close()

    # -- on a thread of its own ------------------------------------------------

    def _follow(self) -> None:
        """Forward the engine's messages, until it has exited permanently."""
        with self._to_us, os.fdopen(self._log, "wb", buffering=0) as log:
            code = -signal.SIGKILL
            try:
                code = self._read_all(log)
            except OSError:
                pass  # closed: there is no listener any more
            except Exception:  # any error of Ray: the supervisor has to start another one
                logger.exception("lost %s", self.spec.name)
            self._exit_code = code

    def _read_all(self, log: Any) -> int:
        lost_at = 0.0
        pending = self._actor.read.remote()
        while True:
            if not ray.wait([pending], timeout=_TURN_S)[0]:
                if not self._is_placed:
                    self._to_us.sendall(PLACING)
                continue
            try:
                said = ray.get(pending)
            except RayActorError:
                # Either Ray restarts it, and the next call waits for that; or it is gone, and the
                # next call fails immediately.
                if self._ends or time.monotonic() - lost_at < 2 * _AGAIN_S:
                    return -signal.SIGKILL
                self._is_placed = False
                self._to_us.sendall(LOST)
                time.sleep(_AGAIN_S)
                lost_at = time.monotonic()
                pending = self._actor.read.remote()
                continue
            self._is_placed = True
            for kind, what in said:
                if kind == "exit":
                    return int(what)
                (self._to_us.sendall if kind == "beat" else log.write)(what)
            pending = self._actor.read.remote()

    def _on_line(self, line: Mapping[str, Any]) -> None:
        if isinstance(phase := line.get("phase"), str):
            self.state.phase, self.state.facts = phase, line
            self.state.reason = str(line.get("reason", self.state.reason))
        else:
            self._messages.append(line)


def _reserve(place: MachineNeeds) -> Any:
    """Return a placement group with a bundle for each process, on one machine; None for one."""
    if place.processes == 1:
        return None
    share = place.memory_bytes // place.processes
    bundle = {"memory": share} if share else {"CPU": 1}
    labels = [dict(place.labels)] * place.processes if place.labels else None
    return placement_group(
        [bundle] * place.processes, strategy="STRICT_PACK", bundle_label_selector=labels
    )


def _options(place: MachineNeeds, group: Any) -> dict[str, Any]:
    """Return the options of an actor for a process that needs ``place``."""
    if group is not None:
        share = place.memory_bytes // place.processes
        strategy = PlacementGroupSchedulingStrategy(group)
        return {"scheduling_strategy": strategy, "num_cpus": 0, "memory": share or None}
    return {
        "scheduling_strategy": "SPREAD",
        "num_cpus": 0,
        "memory": place.memory_bytes or None,
        "label_selector": dict(place.labels) or None,
    }
