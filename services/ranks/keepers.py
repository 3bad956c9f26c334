"""The keepers of the other ranks, as rank 0 reaches them.

Every rank has a keeper on its machine (`services.processes.rank_keeper`), which gets a `RankJob`
from rank 0, and then rank 0's heartbeats, over one connection, and returns those of the rank. Three
things differ: the keeper is a child of rank 0, or is started over ssh, where the connection is
standard input and output, so that no secret is on a command line; or ``mlx.launch`` has started
it, and it connects to rank 0.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.parallel.errors import RankFailed
from engine.parallel.health import KeptRank
from shared.network.hostfile import RankHost
from shared.version import installed_version

MODULE = "services.processes.rank_keeper"
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),  # else it outlives a network
)
GREETING_S = 5.0
"""Max time for a connected keeper to name its rank."""


class RankJob(msgspec.Struct, frozen=True, kw_only=True):
    """A rank to run."""

    model: str
    fingerprint: str = ""
    """Fingerprint of config and weights; others are refused."""
    versions: dict[str, str] = {}
    arguments: list[str]
    environment: dict[str, str]
    files: dict[str, str] = {}
    """Contents of files, by the environment variables that name them."""
    kvstore: list[str] | None = None
    """The command line of a kvstore for the rank; None if it has none of its own."""
    leader: int | None = None
    """Rank 0's process if it is the keeper's parent, with the same installation and model. Both are
    then in one process group, whose signals are for rank 0."""


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    from importlib.metadata import version

    names = ("mlx", "mlx-lm")
    found = {"mlx-lm-server": installed_version(), **{name: version(name) for name in names}}
    return found | {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def model_digest(model: str) -> str:
    """Return the fingerprint of a model on this machine. Raises: `ModelUnavailable`."""
    from engine.model import load

    return load.fingerprint(Path(load.resolve(model)))


def start_here(rank: int, job: RankJob, command: Sequence[str] = ()) -> KeptRank:
    """Start a keeper as a child, with ``command`` if given."""
    command = command or (sys.executable, "-P", "-m", MODULE)
    return _started(rank, job, command, own_session=False)


def start_over_ssh(rank: int, job: RankJob, host: RankHost) -> KeptRank:
    """Start a keeper on another machine."""
    python = shlex.quote(host.python or sys.executable)
    command = (*SSH, host.ssh, f"exec {python} -P -m {MODULE}")
    # Only rank 0 handles signals to the engine's process group.
    return _started(rank, job, command, own_session=True, host=host.ssh)


def _started(
    rank: int, job: RankJob, command: Sequence[str], *, own_session: bool, host: str = ""
) -> KeptRank:
    link, far_end = socket.socketpair()
    with far_end:
        end = far_end.fileno()
        process = subprocess.Popen(command, stdin=end, stdout=end, start_new_session=own_session)
    return send_job(KeptRank(rank, link, process, host), job)


def send_job(kept: KeptRank, job: RankJob) -> KeptRank:
    with suppress(BrokenPipeError, ConnectionResetError):  # it has exited, which `failure` reports
        kept.link.sendall(msgspec.json.encode(job) + b"\n")
    return kept


def accept_launched(hosts: Sequence[RankHost], timeout_s: float) -> list[KeptRank]:
    """Return the keepers that ``mlx.launch`` has started, by rank. They connect to rank 0's
    address, which MLX does not use yet. Raises: `RankFailed`."""
    host, _, port = hosts[0].address.rpartition(":")
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_server((host, int(port))) as server:
            while missing := [rank for rank in range(1, len(hosts)) if rank not in found]:
                server.settimeout(max(0.0, deadline - time.monotonic()) or 0.001)
                try:
                    link, _ = server.accept()
                except TimeoutError:
                    names = ", ".join(f"rank {rank}" for rank in missing)
                    raise RankFailed(f"{names} did not connect within {timeout_s:.0f} s") from None
                link.settimeout(GREETING_S)
                try:
                    rank = int(link.recv(8))
                except (OSError, ValueError):
                    rank = 0
                link.settimeout(None)
                if rank in missing:
                    found[rank] = link
                else:
                    link.close()
    except OSError as error:
        raise RankFailed(f"{hosts[0].address} is in use: {error.strerror}") from error
    except BaseException:
        for link in found.values():
            link.close()
        raise
    return [KeptRank(rank, found[rank]) for rank in sorted(found)]


def read_job(source: int) -> RankJob | None:
    """Return the job that rank 0 sends over the descriptor ``source``, None if it is gone. Raises:
    OSError, msgspec.MsgspecError."""
    line = bytearray()
    while not line.endswith(b"\n"):  # byte by byte: heartbeats follow it
        data = os.read(source, 1)
        if not data:
            return None
        line += data
    return msgspec.json.decode(bytes(line), type=RankJob)


def ignore_signals() -> None:
    """Leave signals to rank 0: they are sent to the whole process group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
