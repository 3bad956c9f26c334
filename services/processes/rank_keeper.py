"""`python -m services.processes.rank_keeper`: runs a rank for a rank 0 on this machine or another.

It reads a `RankJob` from standard input, compares models and versions, starts the rank, and
forwards its heartbeats. The rank never outlives the keeper or its connection: it ends if rank 0,
its machine or the network fails, even if the rank is stopped."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from engine.model.errors import ModelUnavailable
from engine.parallel.health import (
    HEARTBEAT_INTERVAL_S,
    LOADING_SILENCE_S,
    SILENCE_S,
    SUSPENDED_S,
)
from services.ranks.connection import IBV_VARIABLE, RANK_VARIABLE
from services.ranks.keepers import RankJob, ignore_signals, model_digest, read_job, versions
from services.ranks.rdma import lacks_rdma
from shared.environment import HUB_TOKENS, environment_without
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from shared.rundir import RUN_DIR_VARIABLE
from shared.settings import SECRET_VARIABLES
from shared.supervisor_link import LINK_VARIABLE, LineReader

HANGING_UP_S = 0.5
"""A rank that exits closes its link first; its exit code is more informative."""
BYTES = 65536
ENDING_S = 10.0
"""Max time for a kvstore to write its queued blocks."""
STORE_PAUSE_S, LONGEST_STORE_PAUSE_S = 1.0, 60.0
"""Pause before a kvstore is restarted, doubled each time: one of the last group may still have the
files open."""


def main() -> int:
    """Return the exit code."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # kills the rank
    job = read_job(0)
    if job is None:
        return EXIT_OK
    if job.leader is not None:
        ignore_signals()
    return keep(job, 0, 1)


def keep(job: RankJob, source: int, sink: int) -> int:
    """Run the rank of ``job`` while rank 0 is connected. Heartbeats of rank 0 come from ``source``,
    those of the rank go to ``sink``. Return the rank's exit code. Raises: OSError."""
    if job.leader is None and (reason := difference(job)) is not None:
        _say(sink, {"phase": "loading", "reason": reason, "exit": EXIT_CONFIG})
        return EXIT_CONFIG
    with tempfile.TemporaryDirectory(prefix="rank-") as folder:
        own = environment_without(SECRET_VARIABLES | {RUN_DIR_VARIABLE})  # rank 0 removes that
        environment = {**own, **job.environment}
        for variable, content in job.files.items():
            path = Path(folder, variable.lower())
            path.write_text(content)
            environment[variable] = str(path)
        arguments, store = job.arguments, None
        if job.kvstore is not None:
            address = f"--kvstore-socket=ipc://{folder}/kvstore"
            arguments = [*arguments, address]
            store = KeptStore([*job.kvstore, address])
        try:
            code = RankKeeper(arguments, environment, source, sink, store, job.leader).run()
        finally:
            if store is not None:
                store.end()
    with suppress(OSError):  # rank 0 is gone
        _say(sink, {"exit": code})
    return code if code >= 0 else 128 - code


def difference(job: RankJob) -> str | None:
    """Return the reason why this machine cannot compute a part of rank 0's model."""
    rank = int(job.environment[RANK_VARIABLE])
    name = f"rank {rank} on {socket.gethostname()}"
    for program, version in versions().items():
        if version != job.versions.get(program):
            return f"{name} has {program} {version}, rank 0 has {job.versions.get(program)}"
    try:
        found = model_digest(job.model)
    except ModelUnavailable as error:
        return f"{name}: {error}"
    if found != job.fingerprint:
        return f"{name} has other weights or another config for {job.model} than rank 0"
    if (matrix := job.files.get(IBV_VARIABLE)) is not None:
        lacking = lacks_rdma(msgspec.json.decode(matrix)[rank])
        return None if lacking is None else f"{name}: {lacking}"
    return None


class KeptStore:
    """A kvstore for one rank. It writes its queued blocks and exits when this process does."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at, self._pause_s = 0.0, STORE_PAUSE_S

    def update(self, now: float) -> None:
        """Start it if it is not running."""
        if now < self._start_at or (self._process and self._process.poll() is None):
            return
        self._start_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_STORE_PAUSE_S)
        if self._link is not None:
            self._link.close()
        self._link, self._process = _start(
            "services.processes.kvstore",
            self._arguments,
            environment_without(SECRET_VARIABLES | HUB_TOKENS),
        )

    def end(self) -> None:
        if self._link is not None and self._process is not None:
            self._link.close()
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class RankKeeper:
    """Runs a rank, forwards its heartbeats to rank 0, and watches rank 0."""

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        source: int,
        sink: int,
        store: KeptStore | None,
        leader: int | None,
    ) -> None:
        self._source, self._sink, self._store, self._leader = source, sink, store, leader
        self._link, self._rank = _start("services.processes.rank", arguments, environment)
        self._reader = LineReader()
        self._phase = "loading"

    def run(self) -> int:
        """Forward heartbeats until one side is gone, then kill the rank. Return its exit code."""
        try:
            if self._relay():
                with suppress(subprocess.TimeoutExpired):
                    return self._rank.wait(HANGING_UP_S)
        except OSError:
            pass  # rank 0 is gone
        finally:
            self._rank.kill()
            code = self._rank.wait()
            self._link.close()
        return code

    def _relay(self) -> bool:
        """Return whether it was the rank that closed its link."""
        heard_at = looked_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._source, selectors.EVENT_READ)
            selector.register(self._link, selectors.EVENT_READ)
            while True:
                if self._store is not None:
                    self._store.update(time.monotonic())
                for key, _ in selector.select(HEARTBEAT_INTERVAL_S):
                    data = os.read(key.fd, BYTES)
                    if not data:
                        return key.fd != self._source
                    if key.fd == self._source:
                        heard_at = time.monotonic()
                    else:
                        for line in self._reader.lines(data):
                            self._phase = str(line.get("phase", self._phase))
                        _write(self._sink, data)
                limit_s = SILENCE_S if self._phase == "ready" else LOADING_SILENCE_S
                now = time.monotonic()
                if (suspended_s := now - looked_at - HEARTBEAT_INTERVAL_S) > SUSPENDED_S:
                    heard_at += suspended_s  # of this process, and of rank 0 perhaps too
                looked_at = now
                if now - heard_at > limit_s:
                    self._end_silent_leader(limit_s)
                    return False

    def _end_silent_leader(self, limit_s: float) -> None:
        """Kill rank 0 if it is on this machine: its supervisor would wait longer before it restarts
        the group."""
        here = self._leader is not None and os.getppid() == self._leader
        end = "killed" if here else "this rank exits"
        sys.stderr.write(f"rank 0 sent no heartbeat for {limit_s:.0f} s: {end}\n")
        if here:
            os.kill(os.getppid(), signal.SIGKILL)


def _start(
    module: str, arguments: list[str], environment: Mapping[str, str]
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the link of a child process, and the process."""
    link, child_end = socket.socketpair()
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            env={**environment, LINK_VARIABLE: str(child_end.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=(child_end.fileno(),),
        )
    return link, process


def _say(sink: int, message: dict[str, object]) -> None:
    _write(sink, msgspec.json.encode(message) + b"\n")


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]


def _end(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main()
    except OSError as error:  # the reader is gone
        sys.stderr.write(f"lost the connection to rank 0: {error}\n")
        code = EXIT_FAILED
    _end(code)
