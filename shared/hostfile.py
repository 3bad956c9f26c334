"""The machines of an engine's ranks, as ``mlx.launch`` reads them from a hostfile.

A JSON list, or an object with such a list under ``hosts``: ``{"ssh": "mac2", "ips": ["10.0.0.2"],
"rdma": [null, "rdma_en2"]}`` for each machine, the first one being this. ``python`` may say which
interpreter to start there; without it, that of this process.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

import msgspec

MOST_HOSTS = 64
MOST_BYTES = 1 << 20
_DEVICE = re.compile("[A-Za-z][A-Za-z0-9_.-]*")
Device = str | list[str] | None
"""The RDMA device, or several, that leads to another rank. None: this rank itself."""


class HostfileError(Exception):
    """The file is not usable. The text is one line."""


class RankHost(msgspec.Struct, frozen=True):
    """The machine of one rank."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[Device, ...] = ()
    python: str | None = None


class _Hosts(msgspec.Struct, frozen=True):
    hosts: tuple[RankHost, ...]


@lru_cache
def read_hostfile(path: Path) -> tuple[RankHost, ...]:
    """Return the machines of all ranks, rank 0's first. Raises: `HostfileError`."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_BYTES))
        hosts = msgspec.convert(
            found if isinstance(found, dict) else {"hosts": found}, _Hosts
        ).hosts
    except OSError as error:
        raise HostfileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # msgspec's are too
        raise HostfileError(
            f"{path} is not a hostfile like "
            f'[{{"ssh": "mac1", "ips": ["10.0.0.1"]}}, ...]: {" ".join(str(error).split())}'
        ) from error
    if not 2 <= len(hosts) <= MOST_HOSTS:
        raise HostfileError(f"{path} names {len(hosts)} hosts, and not 2 to {MOST_HOSTS}")
    for host in hosts:
        if not host.ips:
            raise HostfileError(f"{path}: {host.ssh} has no ips")
        if host.ssh.startswith("-") or not host.ssh.strip():
            raise HostfileError(f"{path}: {host.ssh!r} is no name of a machine")
    return hosts


def rdma_matrix(hosts: tuple[RankHost, ...], devices: str | None) -> list[list[Device]]:
    """Return which device leads from each rank to each other, as ``MLX_IBV_DEVICES`` wants it.

    ``devices`` is ``--distributed-ibv-devices``: a file with such a matrix, or for two ranks the
    name of the device that both have. Without it the hostfile has to say. Raises: `HostfileError`.
    """
    size = len(hosts)
    if devices is None:
        matrix: object = [list(host.rdma) for host in hosts]
    elif devices.startswith("/dev/"):
        raise HostfileError(
            f"--distributed-ibv-devices: {devices} is a device, and MLX wants a file with the "
            "names of devices (ibv_devices lists them) from each rank to each other, such as "
            '[[null, "rdma_en2"], ["rdma_en2", null]]'
        )
    elif size == 2 and _DEVICE.fullmatch(devices) and not Path(devices).exists():
        matrix = [[None, devices], [devices, None]]
    else:
        try:
            matrix = json.loads(Path(devices).read_bytes())
        except (OSError, ValueError) as error:
            raise HostfileError(
                f"--distributed-ibv-devices: {devices} is no JSON file with a matrix of devices"
            ) from error
    return _checked(matrix, size)


def _checked(matrix: object, size: int) -> list[list[Device]]:
    try:
        rows = msgspec.convert(matrix, list[list[Device]])
    except msgspec.ValidationError as error:
        raise HostfileError(f"the matrix of RDMA devices: {error}") from error
    if [len(row) for row in rows] != [size] * size:
        raise HostfileError(f"RDMA devices have to be listed from each of {size} ranks to each")
    for number, row in enumerate(rows):
        for other, device in enumerate(row):
            if (device is None) != (number == other):
                what = "to itself" if number == other else f"to rank {other}: none is listed"
                raise HostfileError(f"the RDMA device of rank {number} {what}")
    return rows
