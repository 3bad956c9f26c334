"""The other ranks of an engine: rank 0 has each of them run by a keeper.

To the supervisor, an engine of several ranks is one process group. Rank 0 exits when any of them
does, so they are restarted together.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import zmq

from engine.device import HOST_VARIABLE
from engine.model import sharding
from engine.model.errors import ModelUnavailable
from engine.parallel.health import GroupWatch, KeptRank
from engine.parallel.progress import StepProgress
from services.ranks.connection import (
    connection_environment,
    connection_files,
    device_matrix,
    rank_hosts,
)
from services.ranks.keepers import (
    RankJob,
    accept_launched,
    model_digest,
    send_job,
    start_here,
    start_over_ssh,
    versions,
)
from shared import settings
from shared.network.curve import EngineKeys, KeyPair
from shared.network.hostfile import RankHost, hostfile_text, read_whole
from shared.rundir import RUN_DIR_VARIABLE
from shared.settings import Settings
from shared.supervisor_link import ENGINE_NAME_VARIABLE

if TYPE_CHECKING:  # these import mlx
    from engine.parallel.leader import Leader
    from engine.parallel.plans import PlanSender

logger = logging.getLogger(__name__)

SOCKETS_VARIABLE = "_MLX_LM_SERVER_RANK_SOCKETS"
HOSTS_VARIABLE = "MLX_LM_SERVER_DISTRIBUTED_HOSTFILE"
JOIN_TIMEOUT_S = 120.0
OF_THIS_MACHINE = {
    "distributed_hostfile",
    "distributed_ibv_devices",
    "distributed_jaccl_coordinator",
}
"""Settings whose values are meaningless on other machines, or are in the environment of a
`RankJob`."""


def prepare_environment() -> None:
    """Keep a model of several ranks in MLX's graph, where its collectives are."""
    os.environ[HOST_VARIABLE] = "0"


def divided(options: Settings, path: Path) -> Settings:
    """Return ``options`` with the number of ranks to start for the model in ``path``.

    Raises: `ModelUnavailable` if it does not divide evenly and ``--distributed-strict`` is set."""
    reason = sharding.indivisible(path, options.ranks)
    if reason is None:
        return options
    most = sharding.max_ranks(path, options.ranks)
    if options.distributed_strict:
        raise ModelUnavailable(
            f"{options.model} cannot be divided across {options.ranks} ranks: {reason}. Use "
            f"{most} rank{'s' * (most > 1)}, or --no-distributed-strict"
        )
    logger.warning("using %d ranks instead of %d, because %s", most, options.ranks, reason)
    if options.num_local_ranks is None and most > 1:
        return _first_hosts(options, most)
    given = options.given | {"num_local_ranks"}
    return dataclasses.replace(options, num_local_ranks=most, given=given)


def _first_hosts(options: Settings, count: int) -> Settings:
    """Return ``options`` with only the first machines of the hostfile. Raises:
    `ModelUnavailable`."""
    hosts = rank_hosts(options)
    matrix = device_matrix(options, hosts)
    rows = None if matrix is None else [row[:count] for row in matrix[:count]]
    number, name = tempfile.mkstemp(".json", "hosts-", os.environ.get(RUN_DIR_VARIABLE))
    with open(number, "w") as file:
        assert options.distributed_hostfile is not None
        envs = read_whole(options.distributed_hostfile).envs
        file.write(hostfile_text(hosts[:count], rows, envs))
    given = options.given - {"distributed_ibv_devices"}
    return dataclasses.replace(
        options, distributed_hostfile=Path(name), distributed_ibv_devices=None, given=given
    )


def check(options: Settings, path: Path) -> None:
    """Check that ranks can compute the model in ``path``, before anything is loaded. Raises:
    `ModelUnavailable`."""
    from engine.model import load

    load.check_divisible(path, str(options.model), trust=options.trust_remote_code)
    hosts = rank_hosts(options)
    if (matrix := device_matrix(options, hosts)) is not None:
        from services.ranks.rdma import lacks_rdma

        if (lacking := lacks_rdma(matrix[0])) is not None:
            raise ModelUnavailable(f"--distributed-mode jaccl: {lacking}")


class GroupSockets(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses where rank 0 waits for the others."""

    plans: str
    stores: str
    server_key: str | None = None
    """Rank 0's public key for tcp, known only to ranks that it starts."""

    def keys(self) -> EngineKeys | None:
        """Return the keys to connect with, None if none are needed."""
        return None if self.server_key is None else EngineKeys(KeyPair.fresh(), self.server_key)

    @classmethod
    def from_environment(cls) -> GroupSockets | None:
        """Return the addresses that rank 0 gave this process."""
        given = os.environ.get(SOCKETS_VARIABLE)
        return None if given is None else msgspec.json.decode(given, type=cls)

    def to_environment(self) -> dict[str, str]:
        return {SOCKETS_VARIABLE: msgspec.json.encode(self).decode()}


class OtherRanks:
    """All ranks of this engine but rank 0, which is this process."""

    def __init__(
        self,
        options: Settings,
        context: zmq.Context[zmq.Socket[bytes]],
        on_failed: Callable[[str, int], None],
        keeper: Sequence[str] = (),
    ) -> None:
        """Start them; on this machine by the command ``keeper`` if given. ``on_failed`` as in
        `GroupWatch`. Raises: `ModelUnavailable`, `RankFailed`."""
        from engine.io.store.group_store import open_channel
        from engine.parallel.plans import PlanSender

        self.progress, self._backend = StepProgress(), backend(options)
        self._folder = tempfile.mkdtemp(prefix="ranks-", dir=os.environ.get(RUN_DIR_VARIABLE))
        hosts = rank_hosts(options)
        keys = KeyPair.fresh() if hosts else None
        # Other machines may not reach this machine by name, only by its address in the hostfile.
        where = f"tcp://{hosts[0].ips[0]}:*" if hosts else f"ipc://{self._folder}/"
        names = ("", "") if hosts else ("plans", "stores")
        self.plans: PlanSender = PlanSender(context, where + names[0], options.ranks, keys)
        self._stores = open_channel(context, where + names[1], keys)
        sockets = GroupSockets(
            plans=self.plans.address,
            stores=self._stores.get_string(zmq.LAST_ENDPOINT),
            server_key=None if keys is None else keys.public,
        )
        files = connection_files(options, hosts)
        for variable, content in files.items():
            path = Path(self._folder, variable.lower())
            path.write_text(content)
            os.environ[variable] = str(path)
        os.environ |= connection_environment(options, hosts, 0)
        jobs = rank_jobs(options, hosts, sockets, files)
        ranks: list[KeptRank] = []
        try:
            if hosts and hosts[0].address:
                ranks += accept_launched(hosts, JOIN_TIMEOUT_S)
                for kept in ranks:
                    send_job(kept, jobs[kept.rank])
            for rank, job in jobs.items() if not ranks else ():
                ranks.append(
                    start_over_ssh(rank, job, hosts[rank])
                    if hosts
                    else start_here(rank, job, keeper)
                )
        except BaseException:
            for started in ranks:
                started.end()
            raise

        def failed(reason: str, code: int) -> None:
            self._remove_folder()
            on_failed(reason, code)

        self._watch = GroupWatch(ranks, self.progress, failed)
        self._watch.start()

    def join(self) -> Leader:
        """Wait for all ranks and connect them. Raises: `RankFailed`."""
        from engine.parallel.group import RankGroup
        from engine.parallel.leader import Leader

        smallest_bytes = self.plans.wait_for_ranks(JOIN_TIMEOUT_S)
        self.plans.start(b"join")
        group = RankGroup.join(self._backend)
        logger.info("%d ranks are connected", group.size)
        return Leader(group, self.plans, self._stores, self.progress, smallest_bytes)

    def close(self) -> None:
        """Stop them, because this rank has finished its work."""
        self._watch.stop()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def rank_jobs(
    options: Settings, hosts: Sequence[RankHost], sockets: GroupSockets, files: Mapping[str, str]
) -> dict[int, RankJob]:
    """Return the job of each rank but rank 0. ``files`` are those of the connection. Raises:
    `ModelUnavailable`."""
    name = os.environ.get(ENGINE_NAME_VARIABLE, "engine")
    arguments, fingerprint, matrix = rank_arguments(options), "", device_matrix(options, hosts)
    if hosts:
        fingerprint = model_digest(options.model)
        files = {**files, HOSTS_VARIABLE: hostfile_text(hosts, matrix)}
    else:
        arguments += [f"--kvstore-socket={address}" for address in options.kvstore_socket[:1]]
    has_own_store = bool(hosts) and bool(options.kvstore_socket) and not options.no_ssd
    jobs = {}
    for rank in range(1, options.ranks):
        connection = connection_environment(options, hosts, rank)
        jobs[rank] = RankJob(
            model=options.model,
            fingerprint=fingerprint,
            versions=versions() if hosts else {},
            arguments=arguments,
            environment={**connection, **sockets.to_environment(), ENGINE_NAME_VARIABLE: name},
            files=dict(files),
            kvstore=store_arguments(options, rank) if has_own_store else None,
            leader=None if hosts else os.getpid(),
        )
    return jobs


def start(
    options: Settings,
    path: Path,
    context: zmq.Context[zmq.Socket[bytes]],
    on_failed: Callable[[str, int], None],
) -> OtherRanks:
    """Start the other ranks for the model in ``path``. ``on_failed`` as in `GroupWatch`.

    Local ranks start before `check`, because both spend a second on imports, and load nothing
    before `OtherRanks.join`. Raises: `ModelUnavailable`."""
    if rank_hosts(options):
        check(options, path)
        return OtherRanks(options, context, on_failed)
    others = OtherRanks(options, context, on_failed)
    try:
        check(options, path)
    except BaseException:
        others.close()
        raise
    return others


def rank_arguments(options: Settings) -> list[str]:
    """Return the command line of a rank, which may be on another machine. Paths to files of this
    machine are left out; the keeper writes their content to files there."""
    given = options.given - OF_THIS_MACHINE | {"distributed_mode"}
    return settings.command_line(dataclasses.replace(options, given=given))


def store_arguments(options: Settings, rank: int) -> list[str]:
    """Return the command line of a kvstore for ``rank`` of this engine only. Its folder is next to
    the folder of a server on that machine."""
    given = options.given - OF_THIS_MACHINE - {"distributed_mode", "ssd_cache_dir"}
    words = settings.command_line(dataclasses.replace(options, given=given))
    folder, name = options.ssd_cache_dir, os.environ.get(ENGINE_NAME_VARIABLE, "engine")
    if "ssd_cache_dir" not in options.given:  # of the user there
        folder = Path("~") / folder.relative_to(Path.home())
    return [*words, f"--ssd-cache-dir={folder.with_name(f'{folder.name}-{name}-rank-{rank}')}"]


def backend(options: Settings) -> Literal["ring", "jaccl"]:
    """Return MLX's name of the backend that connects the ranks."""
    return "jaccl" if options.distributed_mode == "jaccl" else "ring"
