"""`mlx-lm-server engine`: engines on this machine that join routers elsewhere.

They are children of this process, which restarts them when they exit: after a crash, or because a
router requested it. Blocks are stored on this machine, unless ``--kvstore-socket`` gives another
address.

All models are loaded at startup, none on demand: a router does not know a model before one of its
engines has joined.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from services.supervision.bounded_log import BoundedLog
from services.supervision.fleet.memory import budgets, entry_bytes, total_bytes
from services.supervision.launcher import ChildSpec
from services.supervision.local import GRACE_S, Children
from services.supervision.local_launcher import LocalLauncher
from services.supervision.managed_child import Limits
from services.supervision.output import LogCollector, announce
from services.supervision.supervisor import Supervisor
from shared import logs, settings
from shared.descriptors import raise_descriptor_limit
from shared.environment import HUB_TOKENS, forget
from shared.exits import EXIT_FAILED, EXIT_USAGE, fail
from shared.network.curve import CurveError, engine_keys
from shared.rundir import RunDir, RunDirError
from shared.settings import ModelEntry, Settings

PROG = "mlx-lm-server engine"
ABOUT = "Run engines that join the routers at --engine-socket."
TRY_AGAIN_S = 60.0
"""After this, a model that could not be loaded is tried again: no router can request it."""


def main(argv: Sequence[str]) -> int:
    """Run engines until told to stop; return the exit code."""
    options, models = settings.parse_models(argv, os.environ, PROG, about=ABOUT)
    raise_descriptor_limit()
    if not options.engine_socket:
        return fail(
            PROG, "--engine-socket is required: the address of the router to join", EXIT_USAGE
        )
    try:
        for address in (*options.engine_socket, *options.kvstore_socket):
            engine_keys(options.curve_dir, address)
        with RunDir.create() as run_dir:
            return _supervise(options, joining_children(options, models, run_dir), run_dir)
    except CurveError as error:
        return fail(PROG, f"--curve-dir: {error}")
    except TooManyModels as error:
        return fail(PROG, error)
    except RunDirError as error:
        return fail(PROG, error, EXIT_FAILED)


class TooManyModels(Exception):
    """The models do not fit into memory together; the message is one line for the user."""


def joining_children(
    options: Settings, models: Sequence[ModelEntry], run_dir: RunDir
) -> list[ChildSpec]:
    """Return the specs of the engines of all ``models``, and of the kvstore they share.

    Raises: `TooManyModels`.
    """
    children = Children(options, run_dir, joins=options.engine_socket)
    forget(settings.SECRET_VARIABLES | HUB_TOKENS)
    total = total_bytes(options, None)
    sizes = budgets(models, [entry_bytes(entry) for entry in models], total)
    needed = sum(size * each.settings.engines for each, size in zip(models, sizes, strict=True))
    if not models[0].alone and needed > total:
        raise TooManyModels(
            f"--config: this command loads all models at once, and they need {needed / 1e9:.2f} "
            f"GB of {total / 1e9:.2f} GB (memory-gb, fleet-memory-gb)"
        )
    host = socket.gethostname().partition(".")[0]
    wanted = [
        (entry, size)
        for entry, size in zip(models, sizes, strict=True)
        for _ in range(entry.settings.engines)
    ]
    engines = [
        children.engine(entry, f"{host}-{number}", size)
        for number, (entry, size) in enumerate(wanted)
    ]
    keeps_blocks = not options.no_ssd and not options.kvstore_socket
    return [*([children.kvstore()] if keeps_blocks else []), *engines]


def _supervise(options: Settings, specs: Sequence[ChildSpec], run_dir: RunDir) -> int:
    output = LogCollector(options.log_format)
    logs.setup("supervisor", options.log_level, options.log_format, output)

    launcher = LocalLauncher(output, options.spare_engine_after_s)

    bounded_log = BoundedLog(os.environ)

    def tick() -> None:
        run_dir.keep_fresh()
        bounded_log.tick(time.monotonic())
        launcher.keep_spare(time.monotonic())

    supervisor = Supervisor(
        specs,
        launcher,
        limits=Limits(drain_timeout_s=options.drain_timeout_s + GRACE_S, try_again_s=TRY_AGAIN_S),
        on_ready=lambda: announce(f"{PROG} ready, for {', '.join(options.engine_socket)}\n"),
        on_tick=tick,
    )
    try:
        return supervisor.run()
    finally:
        launcher.close()
        output.close()
