"""The other ranks of an engine: rank 0 starts them, as its children or over ssh.

To the supervisor, an engine of several ranks is one process group. Rank 0 exits when any of them
does, so they are restarted together. MLX finds the ranks through the variables that ``mlx.launch``
would set; that program itself keeps a core busy, and leaves its ranks running when it is told to
stop.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import zmq

from engine.batch.device import HOST_VARIABLE
from engine.model import sharding
from engine.model.errors import ModelUnavailable
from engine.parallel.health import GroupWatch, RankProcess
from engine.parallel.progress import StepProgress
from services.ranks.remote_rank import (
    HOSTFILE_VARIABLE,
    RANK_VARIABLE,
    LaunchedRank,
    RankJob,
    RemoteRank,
    connection_environment,
    connection_files,
    device_matrix,
    launched_links,
    model_digest,
    remote_hosts,
    versions,
)
from shared import settings
from shared.network.curve import EngineKeys, KeyPair
from shared.network.hostfile import RankHost, hostfile_text, read_whole
from shared.network.ports import free_ports
from shared.rundir import RUN_DIR_VARIABLE
from shared.settings import Settings
from shared.supervisor_link import ENGINE_NAME_VARIABLE, LINK_VARIABLE

if TYPE_CHECKING:  # these import mlx
    from engine.parallel.leader import Leader
    from engine.parallel.plans import PlanSender

logger = logging.getLogger(__name__)

MODULE = "services.processes.rank"
SOCKETS_VARIABLE = "_MLX_LM_SERVER_RANK_SOCKETS"
HOSTS_VARIABLE = "MLX_LM_SERVER_DISTRIBUTED_HOSTFILE"
JOIN_TIMEOUT_S = 120.0
OF_THIS_MACHINE = {
    "distributed_hostfile",
    "distributed_ibv_devices",
    "distributed_jaccl_coordinator",
    "num_local_ranks",
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
    hosts = remote_hosts(options)
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
    hosts = remote_hosts(options)
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


class LocalRank:
    """A `RankProcess` that is a child of this one, in its process group."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.link, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                command,
                env={**environment, LINK_VARIABLE: str(child_end.fileno())},
                stdin=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def ended(self, code: int) -> str:
        return f"has exited ({signal.Signals(-code).name if code < 0 else f'code {code}'})"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class LocalRanks:
    """All other ranks of this engine."""

    def __init__(
        self,
        options: Settings,
        context: zmq.Context[zmq.Socket[bytes]],
        on_failed: Callable[[str, int], None],
        command: Sequence[str] = (),
    ) -> None:
        """Start them, with ``command`` if given. ``on_failed`` as in `GroupWatch`."""
        from engine.io.store.group_store import open_channel
        from engine.parallel.plans import PlanSender

        self.progress, self._backend = StepProgress(), backend(options)
        self._folder = tempfile.mkdtemp(prefix="ranks-", dir=os.environ.get(RUN_DIR_VARIABLE))
        hosts = remote_hosts(options)
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
        self._ranks: list[RankProcess] = []
        try:
            if hosts:
                self._start_remote(options, hosts, sockets)
            else:
                self._start_here(options, sockets, command)
        except BaseException:
            for started in self._ranks:
                started.kill()
            raise

        def failed(reason: str, code: int) -> None:
            self._remove_folder()
            on_failed(reason, code)

        self._watch = GroupWatch(self._ranks, self.progress, failed)
        self._watch.start()

    def _start_here(self, options: Settings, sockets: GroupSockets, command: Sequence[str]) -> None:
        # If another program takes one in the meantime, the ranks cannot connect and start again.
        ports = free_ports(options.ranks)
        hosts = Path(self._folder, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        os.environ |= {RANK_VARIABLE: "0", HOSTFILE_VARIABLE: str(hosts)}
        stores = [f"--kvstore-socket={address}" for address in options.kvstore_socket[:1]]
        own_command = [sys.executable, "-P", "-m", MODULE, *settings.command_line(options), *stores]
        for rank in range(1, options.ranks):
            environment = {**os.environ, RANK_VARIABLE: str(rank), **sockets.to_environment()}
            environment.pop(RUN_DIR_VARIABLE, None)  # rank 0 removes it
            self._ranks.append(LocalRank(rank, command or own_command, environment))

    def _start_remote(
        self, options: Settings, hosts: Sequence[RankHost], sockets: GroupSockets
    ) -> None:
        files = connection_files(options, hosts)
        for variable, content in files.items():
            path = Path(self._folder, variable.lower())
            path.write_text(content)
            os.environ[variable] = str(path)
        os.environ |= connection_environment(options, hosts, 0)
        fingerprint = model_digest(options.model)
        name = os.environ.get(ENGINE_NAME_VARIABLE, "engine")
        files = {**files, HOSTS_VARIABLE: hostfile_text(hosts, device_matrix(options, hosts))}
        uses_store = bool(options.kvstore_socket) and not options.no_ssd
        launched = launched_links(hosts, JOIN_TIMEOUT_S) if hosts[0].address else {}
        for rank, host in enumerate(hosts[1:], 1):
            own = connection_environment(options, hosts, rank)
            job = RankJob(
                model=options.model,
                fingerprint=fingerprint,
                versions=versions(),
                arguments=rank_arguments(options),
                environment={**own, **sockets.to_environment(), ENGINE_NAME_VARIABLE: name},
                files=files,
                kvstore=store_arguments(options, rank) if uses_store else None,
            )
            self._ranks.append(
                LaunchedRank(rank, launched[rank], job) if launched else RemoteRank(rank, host, job)
            )

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


def start(
    options: Settings,
    path: Path,
    context: zmq.Context[zmq.Socket[bytes]],
    on_failed: Callable[[str, int], None],
) -> LocalRanks:
    """Start the other ranks for the model in ``path``. ``on_failed`` as in `GroupWatch`.

    Local ranks start before `check`, because both spend a second on imports, and load nothing
    before `LocalRanks.join`. Raises: `ModelUnavailable`."""
    if remote_hosts(options):
        check(options, path)
        return LocalRanks(options, context, on_failed)
    others = LocalRanks(options, context, on_failed)
    try:
        check(options, path)
    except BaseException:
        others.close()
        raise
    return others


def rank_arguments(options: Settings) -> list[str]:
    """Return the command line of a rank on another machine. Paths to files of this machine are
    replaced; their content is passed in the environment."""
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


def ignore_signals() -> None:
    """Leave signals to rank 0: they are sent to the whole process group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
