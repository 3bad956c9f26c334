"""A rank kept by another process: its job, and the connection to it.

Over ssh, the job is sent through standard input, so that no secret is on a command line; after it
come the heartbeats of rank 0, and the rank's heartbeats return on standard output. Ranks started by
``mlx.launch`` connect to rank 0 instead. The other end is `services.processes.rank_keeper`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.model.errors import ModelUnavailable
from engine.parallel.errors import RankFailed
from shared.network.hostfile import (
    Device,
    HostfileError,
    RankHost,
    rdma_matrix,
    read_hostfile,
    read_whole,
)
from shared.settings import Settings
from shared.version import installed_version

logger = logging.getLogger(__name__)

KEEPER = "services.processes.rank_keeper"
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),  # else it outlives a network
)
SSH_FAILED = 255
"""ssh's exit code if it could not connect."""
RANK_VARIABLE, HOSTFILE_VARIABLE = "MLX_RANK", "MLX_HOSTFILE"
IBV_VARIABLE = "MLX_IBV_DEVICES"
CLOSING_S = 3.0
GREETING_S = 5.0
"""Max time for a connected rank to identify itself."""
PORTS = range(20_000, 30_000)
"""Ports where the ranks listen for each other; a group that finds a port in use starts again."""
COORDINATOR_PORT = 32_323


class RankJob(msgspec.Struct, frozen=True, kw_only=True):
    """A process to run on another machine."""

    model: str
    fingerprint: str
    """Fingerprint of config and weights; others are refused."""
    versions: dict[str, str]
    arguments: list[str]
    environment: dict[str, str]
    files: dict[str, str]
    """Contents of files, by the environment variables that name them."""
    kvstore: list[str] | None = None
    """The command line of a kvstore for the rank; None if there is none."""


def remote_hosts(options: Settings) -> tuple[RankHost, ...]:
    """Return the machines of all ranks; empty if all are on this one. Raises:
    `ModelUnavailable`."""
    if options.num_local_ranks is not None or options.distributed_hostfile is None:
        return ()
    try:
        hosts = read_hostfile(options.distributed_hostfile)
    except HostfileError as error:
        raise ModelUnavailable(f"--distributed-hostfile: {error}") from error
    if hosts[0].address and RANK_VARIABLE not in os.environ:
        raise ModelUnavailable(
            f"--distributed-hostfile: {options.distributed_hostfile} contains only addresses: "
            "pass the hostfile of mlx.launch, or start the server under mlx.launch"
        )
    return hosts


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    from importlib.metadata import version

    names = ("mlx", "mlx-lm")
    found = {"mlx-lm-server": installed_version(), **{name: version(name) for name in names}}
    return found | {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def device_matrix(options: Settings, hosts: Sequence[RankHost]) -> list[list[Device]] | None:
    """Return the RDMA devices between all ranks, None if there are none. Raises:
    `ModelUnavailable`."""
    if options.distributed_mode != "jaccl":
        return None
    try:
        return rdma_matrix(tuple(hosts), options.distributed_ibv_devices)
    except HostfileError as error:
        raise ModelUnavailable(str(error)) from error


def connection_files(options: Settings, hosts: Sequence[RankHost]) -> dict[str, str]:
    """Return the files that MLX needs on each machine, by their variables. Raises:
    `ModelUnavailable`."""
    if (matrix := device_matrix(options, hosts)) is not None:
        return {IBV_VARIABLE: json.dumps(matrix)}
    port = random.SystemRandom().choice(PORTS)
    ring = [[f"{ip}:{port + rank}" for ip in host.ips[:1]] for rank, host in enumerate(hosts)]
    return {HOSTFILE_VARIABLE: json.dumps(ring)}


def connection_environment(
    options: Settings, hosts: Sequence[RankHost], rank: int
) -> dict[str, str]:
    """Return the variables of MLX for ``rank``, as ``mlx.launch`` would set them, and those of the
    hostfile."""
    assert options.distributed_hostfile is not None
    found = read_whole(options.distributed_hostfile).environment | {RANK_VARIABLE: str(rank)}
    if options.distributed_mode == "jaccl":
        coordinator = options.distributed_jaccl_coordinator
        found["MLX_JACCL_COORDINATOR"] = coordinator or f"{hosts[0].ips[0]}:{COORDINATOR_PORT}"
    return found


class RemoteRank:
    """A `RankProcess` on another machine."""

    def __init__(self, rank: int, host: RankHost, job: RankJob) -> None:
        self.rank, self._host = rank, host
        self.link, far_end = socket.socketpair()
        python = shlex.quote(host.python or sys.executable)
        with far_end:
            command = [*SSH, host.ssh, f"exec {python} -P -m {KEEPER}"]
            end = far_end.fileno()
            # Only rank 0 handles signals to the engine's process group.
            self._process = subprocess.Popen(command, stdin=end, stdout=end, start_new_session=True)
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it has exited: `exit_code` reports it
            self.link.sendall(msgspec.json.encode(job) + b"\n")

    @property
    def pid(self) -> int:
        """Return the ssh process."""
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def ended(self, code: int) -> str:
        if code == SSH_FAILED:
            return f"on {self._host.ssh} could not be started, or the connection was lost (ssh)"
        return f"on {self._host.ssh} has exited (code {code})"

    def kill(self) -> None:
        """Close the keeper's input, whereupon it kills the rank. ssh then exits by itself."""
        self.link.close()
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LaunchedRank:
    """A `RankProcess` started by ``mlx.launch``, which has connected to this one."""

    def __init__(self, rank: int, link: socket.socket, job: RankJob) -> None:
        self.rank, self.link = rank, link
        with suppress(BrokenPipeError, ConnectionResetError):  # its link is closed then
            self.link.sendall(msgspec.json.encode(job) + b"\n")

    def exit_code(self) -> int | None:
        return None  # the keeper reports it

    def ended(self, code: int) -> str:
        return f"has exited (code {code})"

    def kill(self) -> None:
        """Close the link, whereupon the keeper kills the rank and reconnects."""
        self.link.close()


def launched_links(hosts: Sequence[RankHost], timeout_s: float) -> dict[int, socket.socket]:
    """Return a connection to the keeper of each other rank, by its number. They connect to rank 0's
    address, which MLX does not use yet. Raises: `ModelUnavailable`, `RankFailed`."""
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
    return found


def model_digest(model: str) -> str:
    """Return the fingerprint of a model on this machine. Raises: `ModelUnavailable`."""
    from engine.model import load

    return load.fingerprint(Path(load.resolve(model)))
