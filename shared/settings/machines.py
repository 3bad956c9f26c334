"""The groups of settings of where engines run: ranks, and clusters of machines."""

# ruff: noqa: RUF009  (`flag` makes a dataclass field)
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from shared.flags import flag
from shared.hostfile import read_hostfile


@dataclass(frozen=True, kw_only=True)
class DistributedSettings:
    GROUP: ClassVar = "distributed / tensor parallel"

    distributed_mode: Literal["off", "ring", "jaccl"] = flag(
        "off",
        "how the ranks that compute a model together are connected",
    )
    distributed_sharding: Literal["tensor"] = flag(
        "tensor",
        "how the model is divided between ranks",
    )
    distributed_strict: bool = flag(
        True, "refuse a model that does not divide evenly; otherwise fewer ranks are started"
    )
    distributed_hostfile: Path | None = flag(
        None,
        "machines of the ranks, this one first, as a hostfile of mlx.launch",
        variables=("MLX_HOSTFILE",),
    )
    distributed_ibv_devices: str | None = flag(
        None,
        "file with the RDMA devices between all ranks, or of two ranks the device; for jaccl",
        shown_default="the hostfile's",
        variables=("MLX_IBV_DEVICES",),
    )
    distributed_jaccl_coordinator: str | None = flag(
        None,
        "HOST:PORT at which rank 0 waits for the others; for jaccl",
        shown_default="the hostfile's first address",
        variables=("MLX_JACCL_COORDINATOR",),
    )
    num_local_ranks: int | None = flag(None, "ranks, all on this machine", at_least=1, at_most=64)

    @property
    def ranks(self) -> int:
        """The processes that compute the model of one engine together."""
        if self.distributed_mode == "off":
            return 1
        if self.num_local_ranks is None and self.distributed_hostfile is not None:
            return len(read_hostfile(self.distributed_hostfile))
        return self.num_local_ranks or 1

    @property
    def ranks_here(self) -> int:
        """Those of one engine that share the memory of a machine: the most at one address."""
        if self.distributed_mode == "off" or self.num_local_ranks is not None:
            return self.ranks
        if self.distributed_hostfile is None:
            return 1
        hosts = read_hostfile(self.distributed_hostfile)
        return max(Counter(host.ips[0] for host in hosts).values())


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    GROUP: ClassVar = "cluster"

    cluster: Literal["none", "ray"] = flag(
        "none", "where engines run; none: on this machine; ray: where Ray places them"
    )
    ray_address: str = flag("auto", "address of the Ray cluster; auto: the one of this machine")
    ray_label: tuple[str, ...] = flag(
        (), "NAME=VALUE, a label of the machines on which Ray may place engines"
    )
    max_engines: int | None = flag(
        None,
        "replicas of a model at most, where requests wait; --engines are there always",
        at_least=1,
        at_most=1024,
        shown_default="as many as --engines",
    )
    scale_up_queue: int = flag(
        4, "requests of a model in the queue, by engine, with which one more is started", at_least=1
    )
    scale_down_s: float = flag(
        300.0, "seconds for which an engine is not needed before it is ended", at_least=0
    )
