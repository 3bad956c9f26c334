"""The settings for where engines run: ranks, and clusters of machines."""

# ruff: noqa: RUF009  (`flag` makes a dataclass field)
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from shared.flags import flag
from shared.network.hostfile import read_hostfile


@dataclass(frozen=True, kw_only=True)
class DistributedSettings:
    GROUP: ClassVar = "distributed / tensor parallel"

    distributed_mode: Literal["off", "ring", "jaccl"] = flag(
        "off",
        "how the ranks of a model are connected",
    )
    distributed_sharding: Literal["tensor"] = flag(
        "tensor",
        "how the model is divided across ranks; has no effect: tensor is the only way",
    )
    distributed_strict: bool = flag(
        True, "reject a model that does not divide evenly, instead of starting fewer ranks"
    )
    distributed_hostfile: Path | None = flag(
        None,
        "machines of the ranks, this one first, in mlx.launch's hostfile format",
        variables=("MLX_HOSTFILE",),
    )
    distributed_ibv_devices: str | None = flag(
        None,
        "for jaccl: file with the RDMA devices between all ranks, or the device name for two ranks",
        shown_default="from the hostfile",
        variables=("MLX_IBV_DEVICES",),
    )
    distributed_jaccl_coordinator: str | None = flag(
        None,
        "for jaccl: HOST:PORT where rank 0 waits for the others",
        shown_default="the first address in the hostfile",
        variables=("MLX_JACCL_COORDINATOR",),
    )
    num_local_ranks: int | None = flag(
        None, "number of ranks, all on this machine", at_least=1, at_most=64
    )

    @property
    def ranks(self) -> int:
        """Return the number of processes that compute the model of one engine together."""
        if self.distributed_mode == "off":
            return 1
        if self.num_local_ranks is None and self.distributed_hostfile is not None:
            return len(read_hostfile(self.distributed_hostfile))
        return self.num_local_ranks or 1

    @property
    def ranks_here(self) -> int:
        """Return how many ranks of an engine share the memory of one machine: the max at one
        address.
        """
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
        "none", "where engines run; none: on this machine; ray: on the machines that Ray chooses"
    )
    ray_address: str = flag("auto", "address of the Ray cluster; auto: the cluster of this machine")
    ray_label: tuple[str, ...] = flag(
        (), "NAME=VALUE label of the machines on which Ray may place engines"
    )
    max_engines: int | None = flag(
        None,
        "max replicas of a model while requests wait; --engines of them always run",
        at_least=1,
        at_most=1024,
        shown_default="the value of --engines",
    )
    scale_down_s: float = flag(300.0, "idle seconds until an extra engine is stopped", at_least=0)
