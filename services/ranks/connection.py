"""The machines of a group of ranks, and the files and variables by which MLX connects them.

These are what ``mlx.launch`` would set. That program itself keeps a core busy, and leaves its ranks
running when it is told to stop.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.model.errors import ModelUnavailable
from shared.network.hostfile import (
    Device,
    HostfileError,
    RankHost,
    rdma_matrix,
    read_hostfile,
    read_whole,
)
from shared.network.ports import free_ports

if TYPE_CHECKING:  # a keeper needs none of its imports
    from shared.settings import Settings

RANK_VARIABLE, HOSTFILE_VARIABLE = "MLX_RANK", "MLX_HOSTFILE"
IBV_VARIABLE = "MLX_IBV_DEVICES"
PORTS = range(20_000, 30_000)
"""Ports where the ranks listen for each other; a group that finds a port in use starts again."""
COORDINATOR_PORT = 32_323


def rank_hosts(options: Settings) -> tuple[RankHost, ...]:
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
    """Return the contents of the files that MLX needs for each rank, by their variables. Raises:
    `ModelUnavailable`."""
    if (matrix := device_matrix(options, hosts)) is not None:
        return {IBV_VARIABLE: json.dumps(matrix)}
    if hosts:
        port = random.SystemRandom().choice(PORTS)
        ring = [[f"{ip}:{port + rank}" for ip in host.ips[:1]] for rank, host in enumerate(hosts)]
    else:
        # If another program takes one in the meantime, the ranks cannot connect and start again.
        ring = [[f"127.0.0.1:{port}"] for port in free_ports(options.ranks)]
    return {HOSTFILE_VARIABLE: json.dumps(ring)}


def connection_environment(
    options: Settings, hosts: Sequence[RankHost], rank: int
) -> dict[str, str]:
    """Return MLX's variables for ``rank``, and those of the hostfile."""
    found = {RANK_VARIABLE: str(rank)}
    if hosts:
        assert options.distributed_hostfile is not None
        found = read_whole(options.distributed_hostfile).environment | found
    if options.distributed_mode == "jaccl":
        coordinator = options.distributed_jaccl_coordinator
        found["MLX_JACCL_COORDINATOR"] = coordinator or f"{hosts[0].ips[0]}:{COORDINATOR_PORT}"
    return found
