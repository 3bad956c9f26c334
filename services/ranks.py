"""The other ranks of an engine on this machine: rank 0 starts them, as its own children.

To the supervisor an engine of several ranks is one process group. Rank 0 ends with any of them, so
it is restarted as one. MLX finds the ranks by the variables that ``mlx.launch`` would set; that
program itself keeps a core busy and leaves its ranks behind when it is told to end.
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
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.batch.device import HOST_VARIABLE
from engine.model import sharding
from engine.model.errors import ModelUnavailable
from engine.parallel.health import GroupWatch, RankProcess
from engine.parallel.progress import StepProgress
from shared import settings
from shared.rundir import RUN_DIR_VARIABLE
from shared.settings import Settings
from shared.supervisor_link import LINK_VARIABLE

if TYPE_CHECKING:  # these import mlx
    from engine.parallel.leader import Leader
    from engine.parallel.plans import PlanSender

logger = logging.getLogger(__name__)

MODULE = "services.rank"
SOCKETS_VARIABLE = "_MLX_LM_SERVER_RANK_SOCKETS"
RANK_VARIABLE, HOSTFILE_VARIABLE = "MLX_RANK", "MLX_HOSTFILE"
JOIN_TIMEOUT_S = 120.0


def prepare_environment(options: Settings) -> None:
    """Keep the model of several ranks in MLX's graph, where its collectives are."""
    if options.ranks > 1:
        os.environ[HOST_VARIABLE] = "0"


def divided(options: Settings, path: Path) -> Settings:
    """Return ``options`` with the number of ranks to start for the model in ``path``.

    Raises: `ModelUnavailable` if it does not divide and ``--distributed-strict`` is on."""
    reason = sharding.indivisible(path, options.ranks)
    if reason is None:
        return options
    most = sharding.most_ranks(path, options.ranks)
    if options.distributed_strict:
        raise ModelUnavailable(
            f"{options.model} cannot be divided between {options.ranks} ranks: {reason}. "
            f"--num-local-ranks {most} would do, or --no-distributed-strict"
        )
    logger.warning("%d ranks and not %d, since %s", most, options.ranks, reason)
    given = options.given | {"num_local_ranks"}
    return dataclasses.replace(options, num_local_ranks=most, given=given)


class GroupSockets(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses at which rank 0 waits for the others."""

    plans: str
    stores: str

    @classmethod
    def from_environment(cls) -> GroupSockets | None:
        """Return those that rank 0 gave this process."""
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
        """Start them, with ``command`` if it is given. ``on_failed`` as in `GroupWatch`."""
        from engine.io.group_store import open_channel
        from engine.parallel.plans import PlanSender

        self.progress = StepProgress()
        self._folder = tempfile.mkdtemp(prefix="ranks-", dir=os.environ.get(RUN_DIR_VARIABLE))
        folder = f"ipc://{self._folder}"
        sockets = GroupSockets(plans=f"{folder}/plans", stores=f"{folder}/stores")
        self.plans: PlanSender = PlanSender(context, sockets.plans, options.ranks)
        self._stores = open_channel(context, sockets.stores)
        hosts = Path(self._folder, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(options.ranks)]))
        os.environ |= {RANK_VARIABLE: "0", HOSTFILE_VARIABLE: str(hosts)}
        stores = [f"--kvstore-socket={address}" for address in options.kvstore_socket[:1]]
        own_command = [sys.executable, "-P", "-m", MODULE, *settings.command_line(options), *stores]
        words = command or own_command
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(1, options.ranks):
                environment = {**os.environ, RANK_VARIABLE: str(rank), **sockets.to_environment()}
                environment.pop(RUN_DIR_VARIABLE, None)  # it is rank 0's to remove
                self._ranks.append(LocalRank(rank, words, environment))
        except OSError:
            for started in self._ranks:
                started.kill()
            raise

        def failed(reason: str, code: int) -> None:
            self._remove_folder()
            on_failed(reason, code)

        self._watch = GroupWatch(self._ranks, self.progress, failed)
        self._watch.start()

    def join(self) -> Leader:
        """Wait for all ranks and connect them. Raises: `RankFailed`."""
        from engine.parallel.group import RankGroup
        from engine.parallel.leader import Leader

        self.plans.wait_for_ranks(JOIN_TIMEOUT_S)
        self.plans.start(b"join")
        group = RankGroup.join()
        logger.info("%d ranks are connected", group.size)
        return Leader(group, self.plans, self._stores, self.progress)

    def close(self) -> None:
        """End them: this rank has finished its work."""
        self._watch.stop()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    """Return free ports. Others may take them meanwhile; then the ranks cannot connect, and begin
    again with new ones."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def ignore_signals() -> None:
    """Leave signals to rank 0: they come to the whole process group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
