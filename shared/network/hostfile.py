"""The machines of an engine's ranks, in the hostfile format of ``mlx.launch``.

A JSON list, or an object with such a list under ``hosts`` (and ``envs``, variables for all ranks,
such as ``"MLX_METAL_FAST_SYNCH=1"``): ``{"ssh": "mac2", "ips": ["10.0.0.2"], "rdma": [null,
"rdma_en2"]}`` for each machine, this machine first. ``python`` may name the interpreter to start
there; the default is this process's interpreter.

``mlx.launch`` itself gives its programs a list of addresses for each machine, ``[["10.0.0.1:5000"],
["10.0.0.2:5000"]]``: the ranks are then started already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

MAX_HOSTS = 64
MAX_BYTES = 1 << 20
_ADDRESS = re.compile(r"[^\s:]+:\d{1,5}")
_DEVICE = re.compile("[A-Za-z][A-Za-z0-9_.-]*")
Device = str | list[str] | None
"""The RDMA device or devices that lead to another rank. None: this rank itself."""


class HostfileError(Exception):
    """The file is not usable. The message is one line."""


class RankHost(msgspec.Struct, frozen=True):
    """The machine of one rank."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[Device, ...] = ()
    python: str | None = None
    address: str = ""
    """HOST:PORT of a rank that ``mlx.launch`` has started; ``ssh`` is empty then."""


class Hostfile(msgspec.Struct, frozen=True):
    """The content of a hostfile."""

    hosts: tuple[RankHost, ...]
    envs: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        pairs = (each.partition("=")[::2] for each in self.envs)
        return {name: value for name, value in pairs if name}


def read_hostfile(path: Path) -> tuple[RankHost, ...]:
    """Return the machines of all ranks, rank 0's first. Raises: `HostfileError`."""
    return read_whole(path).hosts


@lru_cache
def read_whole(path: Path) -> Hostfile:
    """Return the content of the hostfile ``path``. Raises: `HostfileError`."""
    try:
        with path.open("rb") as file:
            whole = _decoded(json.loads(file.read(MAX_BYTES)))
        hosts = whole.hosts
    except OSError as error:
        raise HostfileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # msgspec's are too
        raise HostfileError(
            f"{path} is not a hostfile like "
            f'[{{"ssh": "mac1", "ips": ["10.0.0.1"]}}, ...]: {" ".join(str(error).split())}'
        ) from error
    if not 2 <= len(hosts) <= MAX_HOSTS:
        raise HostfileError(f"{path} names {len(hosts)} hosts, expected 2 to {MAX_HOSTS}")
    for host in hosts:
        if not host.ips:
            raise HostfileError(f"{path}: {host.ssh} has no ips")
        if not host.address and (host.ssh.startswith("-") or not host.ssh.strip()):
            raise HostfileError(f"{path}: {host.ssh!r} is not a machine name")
    return whole


def hostfile_text(
    hosts: Sequence[RankHost],
    matrix: list[list[Device]] | None = None,
    envs: Sequence[str] = (),
) -> str:
    """Return a hostfile with ``hosts``, their RDMA devices in ``matrix``, and variables."""
    if matrix is not None:
        hosts = [
            msgspec.structs.replace(host, rdma=tuple(row))
            for host, row in zip(hosts, matrix, strict=True)
        ]
    return msgspec.json.encode(Hostfile(tuple(hosts), tuple(envs))).decode()


def _decoded(found: object) -> Hostfile:
    if isinstance(found, list) and found and all(isinstance(each, list) for each in found):
        rings = msgspec.convert(found, list[list[str]])
        addresses = [ring[0] if ring else "" for ring in rings]
        if not all(_ADDRESS.fullmatch(address) for address in addresses):
            raise ValueError("each rank needs an address like 10.0.0.1:5000")
        return Hostfile(
            tuple(RankHost("", (each.rpartition(":")[0],), address=each) for each in addresses)
        )
    return msgspec.convert(found if isinstance(found, dict) else {"hosts": found}, Hostfile)


def rdma_matrix(hosts: tuple[RankHost, ...], devices: str | None) -> list[list[Device]]:
    """Return the RDMA devices from each rank to each other rank, in the format of
    ``MLX_IBV_DEVICES``.

    ``devices`` is ``--distributed-ibv-devices``: a file with such a matrix, or for two ranks the
    name of the device that both have. Without it, the hostfile must list them. Raises:
    `HostfileError`.
    """
    size = len(hosts)
    if devices is None:
        matrix: object = [list(host.rdma) for host in hosts]
    elif devices.startswith("/dev/"):
        raise HostfileError(
            f"--distributed-ibv-devices: {devices} is a device path; pass a file with the "
            "device names (ibv_devices lists them) from each rank to each other, such as "
            '[[null, "rdma_en2"], ["rdma_en2", null]]'
        )
    elif size == 2 and _DEVICE.fullmatch(devices) and not Path(devices).exists():
        matrix = [[None, devices], [devices, None]]
    else:
        try:
            matrix = json.loads(Path(devices).read_bytes())
        except (OSError, ValueError) as error:
            raise HostfileError(
                f"--distributed-ibv-devices: {devices} is not a JSON file with a matrix of devices"
            ) from error
    return _checked(matrix, size)


def _checked(matrix: object, size: int) -> list[list[Device]]:
    try:
        rows = msgspec.convert(matrix, list[list[Device]])
    except msgspec.ValidationError as error:
        raise HostfileError(f"invalid matrix of RDMA devices: {error}") from error
    if [len(row) for row in rows] != [size] * size:
        raise HostfileError(
            f"RDMA devices must be listed from each of {size} ranks to each other rank"
        )
    for number, row in enumerate(rows):
        for other, device in enumerate(row):
            if (device is None) != (number == other):
                what = "to itself" if number == other else f"to rank {other}: none is listed"
                raise HostfileError(f"the RDMA device of rank {number} {what}")
    return rows
