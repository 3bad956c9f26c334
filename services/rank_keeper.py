"""`python -m services.rank_keeper`: keeps a rank on this machine for a rank 0 on another one.

It reads a `RankJob` from its standard input, compares models and versions, starts the rank, and
hands beats from one to the other. The rank never outlives it, nor the connection: whatever ends
rank 0, its machine or the network, and also if the rank is stopped.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import msgspec

from engine.model.errors import ModelUnavailable
from engine.parallel.health import LOADING_SILENCE_S, SILENCE_S
from services.remote_rank import RankJob, model_digest, versions
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from shared.supervisor_link import LINK_VARIABLE, LineReader

JOB_TIMEOUT_S = 30.0
LONGER_S = 2.0
"""The rank itself ends after `SILENCE_S`; what is stopped does not."""
BYTES = 65536


def main() -> int:
    """Return the exit code of the rank."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    job = _read_job()
    if (reason := difference(job)) is not None:
        _say({"phase": "loading", "reason": reason})
        return EXIT_CONFIG
    with tempfile.TemporaryDirectory(prefix="rank-") as folder:
        environment = {**os.environ, **job.environment}
        for variable, content in job.files.items():
            path = Path(folder, variable.lower())
            path.write_text(content)
            environment[variable] = str(path)
        return RankKeeper(job, environment).run()


def difference(job: RankJob) -> str | None:
    """Return why this machine cannot compute a part of the model of rank 0."""
    name = f"rank {job.environment['MLX_RANK']} on {socket.gethostname()}"
    for program, version in versions().items():
        if version != job.versions.get(program):
            return f"{name} has {program} {version}, and rank 0 {job.versions.get(program)}"
    try:
        found = model_digest(job.model)
    except ModelUnavailable as error:
        return f"{name}: {error}"
    if found != job.fingerprint:
        return f"{name} has other weights or another config of {job.model} than rank 0"
    return None


class RankKeeper:
    def __init__(self, job: RankJob, environment: dict[str, str]) -> None:
        self._link, child_end = socket.socketpair()
        with child_end:
            self._rank = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.rank", *job.arguments],
                env={**environment, LINK_VARIABLE: str(child_end.fileno())},
                stdin=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
            )
        self._reader = LineReader()
        self._phase = "loading"

    def run(self) -> int:
        """Hand on what both say until one is gone. Then the rank is killed."""
        try:
            self._relay()
        finally:
            if self._rank.poll() is None and not self._hung_up():
                self._rank.kill()
            code = self._rank.wait()
        return code if code >= 0 else 128 - code

    def _hung_up(self) -> bool:
        """Wait a moment for a rank that has closed its link: its exit code says more."""
        try:
            self._rank.wait(0.5)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _relay(self) -> None:
        heard_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._link, selectors.EVENT_READ)
            while True:
                events = selector.select(SILENCE_S / 5)
                for key, _ in events:
                    data = os.read(key.fd, BYTES)
                    if not data:
                        return
                    if key.fd == 0:
                        heard_at = time.monotonic()
                        self._link.sendall(data)
                    else:
                        for line in self._reader.lines(data):
                            self._phase = str(line.get("phase", self._phase))
                        _write(data)
                limit_s = SILENCE_S if self._phase == "ready" else LOADING_SILENCE_S
                if time.monotonic() - heard_at > limit_s + LONGER_S:
                    return


def _read_job() -> RankJob:
    """Read one line, byte by byte: what follows it is for the rank."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            os._exit(EXIT_OK)
        line += data
    return msgspec.json.decode(bytes(line), type=RankJob)


def _say(message: dict[str, str]) -> None:
    _write(msgspec.json.encode(message) + b"\n")


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _end(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        code = main()
    except OSError as error:  # nobody reads any more
        sys.stderr.write(f"the connection to rank 0 is lost: {error}\n")
        code = EXIT_FAILED
    _end(code)
