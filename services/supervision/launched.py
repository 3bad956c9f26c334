"""A server under ``mlx.launch``, which runs one command per rank and restarts nothing.

Rank 0 is the server. Each other process keeps a rank for it: it connects to rank 0, runs its job,
and reconnects when the group ends. All exit with ``mlx.launch``.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping

import msgspec

from services.processes.rank_keeper import keep
from services.ranks.connection import HOSTFILE_VARIABLE, RANK_VARIABLE
from services.ranks.group import HOSTS_VARIABLE, SOCKETS_VARIABLE, rank_arguments, store_arguments
from services.ranks.keepers import RankJob, read_job
from shared import logs
from shared.exits import EXIT_FAILED, EXIT_OK
from shared.network.hostfile import RankHost, read_hostfile
from shared.settings import Settings
from shared.supervisor_link import ENGINE_NAME_VARIABLE

logger = logging.getLogger(__name__)

PAUSE_S = 0.5
WITHOUT_LEADER_S = 90.0
"""Time that a rank waits for the next group: longer than any pause of rank 0's supervisor."""
FROM_RANK_0 = {SOCKETS_VARIABLE, ENGINE_NAME_VARIABLE, RANK_VARIABLE}
FILES_FROM_RANK_0 = {HOSTFILE_VARIABLE, HOSTS_VARIABLE}
"""The only settings accepted from the process at the address of rank 0; the rest are this process's
own."""


def launched_hosts(options: Settings) -> tuple[RankHost, ...]:
    """Return the ranks started by ``mlx.launch``; none if this process has another parent."""
    path = options.distributed_hostfile
    if RANK_VARIABLE not in os.environ or path is None or options.num_local_ranks is not None:
        return ()
    hosts = read_hostfile(path) if options.distributed_mode == "ring" else ()
    return hosts if hosts and hosts[0].address else ()


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PAUSE_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def keep_rank(options: Settings, hosts: tuple[RankHost, ...], rank: int) -> int:
    """Keep a rank other than 0 for as long as ``mlx.launch`` and rank 0 are there. Return the exit
    code."""
    logs.setup(f"rank-{rank}", options.log_level, options.log_format)
    ending: list[int] = []  # the group may still finish its streams
    signal.signal(signal.SIGINT, lambda number, _: ending.append(number))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # kills the rank
    end_with_parent()
    code = EXIT_OK
    left_at: float | None = None  # rank 0, for the last time
    while not ending:
        if left_at is not None and time.monotonic() - left_at > WITHOUT_LEADER_S:
            logger.info("rank 0 has ended")
            return code
        host, _, port = hosts[0].address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), PAUSE_S) as link:
                link.settimeout(None)
                link.sendall(b"%d\n" % rank)
                job = read_job(link.fileno())
                if job is not None:
                    left_at = math.inf
                    code = keep(own_job(job, options, rank), link.fileno(), link.fileno())
        except OSError:  # it is not there yet, or not any more
            pass
        except msgspec.MsgspecError:
            logger.error("%s is not rank 0 of this server", hosts[0].address)
            return EXIT_FAILED
        if left_at == math.inf:
            left_at = time.monotonic()
        time.sleep(PAUSE_S)
    return code


def own_job(job: RankJob, options: Settings, rank: int) -> RankJob:
    """Return ``job`` with this process's settings, except for those that only rank 0 can know."""
    environment = _only(job.environment, FROM_RANK_0) | {RANK_VARIABLE: str(rank)}
    return msgspec.structs.replace(
        job,
        model=options.model,
        arguments=rank_arguments(options),
        environment=environment,
        files=_only(job.files, FILES_FROM_RANK_0),
        kvstore=None if job.kvstore is None else store_arguments(options, rank),
        leader=None,
    )


def _only(found: Mapping[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in found.items() if name in names}
