"""`python -m services.processes.engine`: one replica of a model."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from engine import device
from engine.backend.blas import load_fast_blas
from engine.io.inbox import Inbox
from engine.io.router_links import RouterLinks
from engine.io.status import EngineStatus
from engine.io.thread import IOThread
from engine.io.traces import SequenceTraces
from engine.model.errors import ModelUnavailable
from engine.model.hub import patience
from engine.model.starting import StartTimes, lean_imports
from engine.parallel.errors import RankFailed
from services.processes.ready import announce, digests
from services.processes.stores import connect_store
from services.processes.text_engine import serve_texts, task_of
from services.ranks import group as ranks
from shared import logs, settings, wire
from shared.descriptors import raise_descriptor_limit
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_USAGE
from shared.network.curve import CurveError, engine_keys
from shared.paths import user_cache
from shared.settings import Settings
from shared.supervisor_link import ENGINE_NAME_VARIABLE, SupervisorLink
from shared.tracing import TracingUnavailable, open_tracing
from shared.version import installed_version
from shared.wire import TENSOR_PARALLEL

if TYPE_CHECKING:  # these import mlx
    import mlx.core as mx

    from engine.intake import Intake
    from engine.model.load import LoadedModel
    from engine.replica.build import Replica

logger = logging.getLogger("engine")

PROG = "services.processes.engine"
CHECK_VARIABLE = "_MLX_LM_SERVER_CHECK_INTEGRITY"
OTHER_RANK_S = 1.0
"""How long a failed step waits for the watch of the ranks, which ends the process with a better
reason if another rank has ended: a step fails then too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the exit code.

    The process ends itself if it makes no progress (`engine.io.thread`).
    """
    options = settings.parse(
        sys.argv[1:] if argv is None else argv, os.environ, PROG, one_model=True
    )
    name = os.environ.get(ENGINE_NAME_VARIABLE, f"engine-{socket.gethostname()}-{os.getpid()}")
    logs.setup(name, options.log_level, options.log_format)
    raise_descriptor_limit()
    supervisor = SupervisorLink.from_environment()
    if not options.engine_socket:
        logger.error("--engine-socket is required: the address of this engine's router")
        return EXIT_USAGE
    try:
        tracing = open_tracing(options.otlp_endpoint, name)
        keys = {
            address: engine_keys(options.curve_dir, address)
            for address in (*options.engine_socket, *options.kvstore_socket)
        }
    except (TracingUnavailable, CurveError) as error:
        flag = "otlp-endpoint" if isinstance(error, TracingUnavailable) else "curve-dir"
        logger.error("--%s: %s", flag, error)
        return EXIT_CONFIG
    if supervisor is not None:
        supervisor.watch(lambda: os._exit(EXIT_OK))
    status, inbox = EngineStatus(), Inbox()
    patience.wait(lambda reason: setattr(status, "reason", reason))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    names = {"engine": name, "incarnation": uuid.uuid4().hex}
    io_thread = IOThread(
        links=RouterLinks(context, {each: keys[each] for each in options.engine_socket}),
        **names,
        inbox=inbox,
        status=status,
        supervisor=supervisor,
        stall_timeout_s=options.stall_timeout_s,
        drain_timeout_s=options.drain_timeout_s,
        traces=None if tracing is None else SequenceTraces(tracing, name),
    )
    io_thread.catch_signals()
    io_thread.start()
    try:
        end_group = partial(_end_group, supervisor)
        serve(options, context, io_thread, inbox, status, on_rank_failed=end_group, **names)
    except ModelUnavailable as error:
        logger.error("%s", error.with_flag())
        if supervisor is not None:
            supervisor.heartbeat("failed", reason=str(error))
        return EXIT_CONFIG
    except Exception as error:
        _log_end(error)
        return EXIT_FAILED
    io_thread.send([wire.Bye(**names)])
    io_thread.stop()
    if tracing is not None:
        tracing.close()
    logger.info("drained")
    return EXIT_OK


def _log_end(error: Exception) -> None:
    """Log why the engine ends. If another rank ended, the watch of the ranks does so instead."""
    if isinstance(error, RankFailed):
        time.sleep(OTHER_RANK_S)
    logger.error("cannot continue: %s", error, exc_info=not isinstance(error, RankFailed))


def _end_group(supervisor: SupervisorLink | None, reason: str, code: int) -> None:
    """End this rank after another rank has ended, on a thread that nothing blocks."""
    logger.error("%s: all ranks exit", reason)
    if supervisor is not None:
        supervisor.heartbeat("failed", reason=reason)
    os._exit(code)


def serve(
    options: Settings,
    context: zmq.Context[zmq.Socket[bytes]],
    io_thread: IOThread,
    inbox: Inbox,
    status: EngineStatus,
    *,
    engine: str,
    incarnation: str,
    on_rank_failed: Callable[[str, int], None],
) -> None:
    """Load the model and serve until drained. Raises: `ModelUnavailable`."""
    times = StartTimes()
    load_fast_blas(options.ranks)  # before MLX is imported by the code below
    path, names = model_path(options.model), {"engine": engine, "incarnation": incarnation}
    if (task := task_of(options, path)) != "generate":
        serve_texts(options, path, task, io_thread, inbox, status, times, **names)
    else:
        serve_sequences(options, context, io_thread, inbox, status, times, on_rank_failed, **names)


def serve_sequences(
    options: Settings,
    context: zmq.Context[zmq.Socket[bytes]],
    io_thread: IOThread,
    inbox: Inbox,
    status: EngineStatus,
    times: StartTimes,
    on_rank_failed: Callable[[str, int], None],
    *,
    engine: str,
    incarnation: str,
) -> None:
    """Like `_serve`, for a model that generates text."""
    with lean_imports():
        others = None
        if options.ranks > 1:
            options, others = _start_ranks(options, context, on_rank_failed)
        from engine.batch.metal import records
        from engine.core import EngineCore
        from engine.replica.build import build_replica
        from engine.replica.intake import open_intake

        times.ended("imports")
        device.prepare()
        leader = others.join() if others is not None else None
        logger.info("loading the model %s", options.model)
        loaded = load_model(options, None if leader is None else leader.group.mlx)
    times.ended("weights and tokenizer")
    status.enter_phase("warming")
    records.keep_in(user_cache() / "kernels", repeats=options.prove == "always")
    replica = build_replica(loaded, options, user_cache() / "proofs", leader)
    times.ended("layout and checks")
    store = connect_store(options, context, replica, io_thread, inbox, leader)
    intake = open_intake(loaded, replica, inbox)
    times.ended("grammars")
    hello = _hello(options, loaded, replica, intake, engine=engine, incarnation=incarnation)
    announce(hello, loaded.tokenizer_files, io_thread, status, times)
    EngineCore(
        scheduler=replica.scheduler,
        executor=replica.executor,
        inbox=inbox,
        io_thread=io_thread,
        status=status,
        store=store,
        intake=intake,
        pixels=None if replica.vision is None else replica.vision.pixels,
        check_integrity=CHECK_VARIABLE in os.environ,
        on_idle=replica.keep_costs,
    ).run()
    replica.keep_costs(at_once=True)
    intake.close()
    if others is not None:
        others.close()


def _start_ranks(
    options: Settings,
    context: zmq.Context[zmq.Socket[bytes]],
    on_failed: Callable[[str, int], None],
) -> tuple[Settings, ranks.OtherRanks | None]:
    """Start the other ranks. Return the settings with the number of ranks, and the ranks."""
    from engine.model import load as models

    path = models.resolve(options.model)
    options = ranks.divided(options, path)
    if options.ranks == 1:
        return options, None
    ranks.prepare_environment()
    return options, ranks.start(options, path, context, on_failed)


def model_path(name: str) -> Path:
    """Return the folder of a model, after downloading it if needed. Raises: `ModelUnavailable`."""
    from engine.model import load as models

    return models.resolve(name)


def load_model(options: Settings, group: mx.distributed.Group | None = None) -> LoadedModel:
    """Load the model of ``options``, or this rank's part of it. Raises: `ModelUnavailable`."""
    from engine.model import load as models

    return models.load(
        models.resolve(options.model),
        adapter_path=options.adapter_path,
        max_kv_size=options.max_kv_size,
        tokenizer_options=models.TokenizerOptions(
            eos_token=options.eos_token, bos_token=options.bos_token, pad_token=options.pad_token
        ),
        trust_remote_code=options.trust_remote_code,
        group=group,
    )


def _hello(
    options: Settings,
    loaded: LoadedModel,
    replica: Replica,
    intake: Intake,
    *,
    engine: str,
    incarnation: str,
) -> wire.Hello:
    names = options.served_model_name or (options.model,)
    return wire.Hello(
        protocol=wire.PROTOCOL_VERSION,
        engine=engine,
        incarnation=incarnation,
        model=names[0],
        aliases=list(names[1:]),
        fingerprint=f"{loaded.fingerprint}{loaded.adapter}",
        parameters=loaded.parameters,
        weights_bytes=sum(file.stat().st_size for file in loaded.weight_files),
        context_length=replica.scheduler.context_length,
        vocab_size=loaded.vocab_size,
        block_size=options.block_size,
        total_blocks=replica.num_blocks,
        max_sequences=replica.executor.spec.max_sequences or options.completion_batch_size,
        max_batch_size=replica.scheduler.config.max_batch_size,
        namespace=replica.namespace,
        eos_token_ids=list(loaded.eos_token_ids),
        files=digests(loaded.tokenizer_files),
        capabilities=[
            *replica.capabilities,
            *intake.grammars.capabilities,
            *([TENSOR_PARALLEL] if options.ranks > 1 else []),
        ],
        kv_bits=replica.executor.spec.kv_bits,
        attends_by=replica.executor.spec.attends_by,
        version=installed_version(),
        vision=None if replica.vision is None else replica.vision.vision,
        options=settings.serving_options(options),
        adapters=[] if replica.adapters is None else replica.adapters.of_settings,
        max_adapters=0 if replica.adapters is None else replica.adapters.places.count,
    )


def leave(code: int) -> None:
    """Exit at once. MLX's threads may crash while the interpreter shuts down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
