"""`python -m services.processes.rank`: a rank of an engine other than rank 0, run by a keeper."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

import zmq

from engine import device
from engine.backend.blas import load_fast_blas
from engine.model.errors import ModelUnavailable
from engine.model.starting import lean_imports
from engine.parallel.errors import RankFailed
from engine.parallel.health import RankHeartbeats
from engine.parallel.progress import StepProgress
from services.processes.engine import load_model
from services.processes.stores import connect_rank_store
from services.ranks.connection import RANK_VARIABLE
from services.ranks.group import GroupSockets, backend, prepare_environment
from services.ranks.keepers import ignore_signals
from shared import logs, settings
from shared.descriptors import raise_descriptor_limit
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_USAGE
from shared.paths import user_cache
from shared.settings import Settings
from shared.supervisor_link import ENGINE_NAME_VARIABLE, SupervisorLink

logger = logging.getLogger("rank")

PROG = "services.processes.rank"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the plans of rank 0 until it is gone; return the exit code."""
    ignore_signals()
    options = settings.parse(
        sys.argv[1:] if argv is None else argv, os.environ, PROG, one_model=True
    )
    rank = int(os.environ.get(RANK_VARIABLE, 0))
    name = os.environ.get(ENGINE_NAME_VARIABLE, "engine")
    logs.setup(f"{name}/rank-{rank}", options.log_level, options.log_format)
    raise_descriptor_limit()
    link = SupervisorLink.from_environment()
    sockets = GroupSockets.from_environment()
    if link is None or sockets is None or not 0 < rank < options.ranks:
        logger.error("rank 0 of an engine with --distributed-mode starts this program")
        return EXIT_USAGE
    progress = StepProgress()
    heartbeats = RankHeartbeats(link, progress)
    heartbeats.start()
    try:
        serve(options, sockets, rank, heartbeats, progress)
    except ModelUnavailable as error:
        heartbeats.send(reason=str(error))
        return EXIT_CONFIG
    except RankFailed as error:
        logger.error("%s", error)
    except Exception:
        logger.exception("rank %d cannot continue", rank)
    return EXIT_FAILED


def serve(
    options: Settings,
    sockets: GroupSockets,
    rank: int,
    heartbeats: RankHeartbeats,
    progress: StepProgress,
) -> None:
    """Load this rank's part of the model and run plans. Raises: `ModelUnavailable`, `RankFailed`,
    and what steps raise."""
    prepare_environment()
    load_fast_blas(options.ranks)  # before MLX is imported by the code below
    with lean_imports():
        from engine.batch.metal import records
        from engine.io.store.rank_store import connect_channel
        from engine.parallel.follower import follow
        from engine.parallel.group import RankGroup
        from engine.parallel.plans import PlanReceiver
        from engine.proving.remembered import AgreedRecord
        from engine.replica.build import build_rank
        from engine.replica.memory import EngineMemory

        device.prepare()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        own_bytes = EngineMemory.of(options).size_bytes
        plans = PlanReceiver(context, sockets.plans, rank, own_bytes, sockets.keys())
        plans.wait_for_start()
        group = RankGroup.join(backend(options))
        loaded = load_model(options, group.mlx)
    record = AgreedRecord.decode(plans.wait_for_start())
    records.keep_in(user_cache() / "kernels", repeats=options.prove == "always")
    executor, namespace = build_rank(loaded, options, record, group)
    blocks = None
    if options.kvstore_socket and executor.spec.prefix_cache and not options.no_ssd:
        channel = connect_channel(context, sockets.stores, rank, sockets.keys())
        blocks = connect_rank_store(options, context, channel, rank, namespace, executor.spec)
        blocks.start()
    gc.freeze()
    heartbeats.phase = "ready"
    follow(executor, plans, progress, blocks)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # MLX's threads may crash while the interpreter shuts down
