"""`mlx-lm-server serve`: all processes of a server on one machine, as children of this one."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any

from engine.backend import allocation
from services.processes.listener import ListenError, base_url, inherited, listen, log_access
from services.ranks.connection import RANK_VARIABLE
from services.supervision.bounded_log import BoundedLog
from services.supervision.fleet.engine_pool import SpecMaker
from services.supervision.fleet.fleet import ROUTER, EngineFleet
from services.supervision.fleet.model_jobs import Kind, ModelJobs
from services.supervision.launched import end_with_parent, keep_rank, launched_hosts
from services.supervision.launcher import ChildSpec, LaunchedProcess, Launcher
from services.supervision.local_launcher import LocalLauncher
from services.supervision.managed_child import Limits
from services.supervision.output import LogCollector, announce
from services.supervision.ray.cluster import ClusterUnavailable, RayCluster
from services.supervision.supervisor import Supervisor
from shared import logs, settings
from shared.descriptors import raise_descriptor_limit
from shared.environment import HUB_TOKENS, forget
from shared.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_USAGE, fail
from shared.flags import FlagError
from shared.network.curve import CurveError
from shared.paths import python_path
from shared.rundir import RUN_DIR_VARIABLE, RunDir, RunDirError
from shared.settings import ModelEntry, Settings
from shared.supervisor_link import (
    ENGINE_NAME_VARIABLE,
    HTTP_VARIABLE,
    SERVER_ENDS,
    SupervisorLink,
)

logger = logging.getLogger(__name__)

PROG = "mlx-lm-server"
_HIDDEN = settings.VARIABLES | settings.SECRET_VARIABLES | HUB_TOKENS
"""Children get settings as flags, and the router its secrets: what the user set in the environment
for one model is not for a model that a client asks for."""
GRACE_S = 5.0
"""Time in addition to --drain-timeout-s in which a child must exit by itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    given = dict(os.environ)
    options, models = settings.parse_models(argv, given, PROG)
    raise_descriptor_limit()
    if hosts := launched_hosts(options):
        if not models[0].alone:
            return fail(
                PROG,
                "--config: not supported with ranks started by mlx.launch, which belong to one "
                "model",
                EXIT_USAGE,
            )
        if rank := int(os.environ[RANK_VARIABLE]):
            return keep_rank(options, hosts, rank)
        end_with_parent()
    starter = SupervisorLink.from_environment()
    try:
        # The socket is created here, not in the router, so that connections wait instead of being
        # refused while the router restarts.
        http_socket = inherited() or listen(options.listen_host, options.port)
        with http_socket as http, RunDir.create() as run_dir:
            if starter is not None:  # a server started by another program exits with it
                starter.watch(lambda: os.kill(os.getpid(), signal.SIGTERM))
            if options.cluster == "none":
                return _supervise(argv, given, options, models, http, run_dir)
            with closing(RayCluster(options, run_dir)) as cluster:
                return _supervise(argv, given, options, models, http, run_dir, cluster)
    except (ListenError, RunDirError) as error:
        return fail(PROG, error, EXIT_FAILED)
    except (ClusterUnavailable, CurveError) as error:
        return fail(PROG, f"--cluster: {error}")


class Children:
    """Creates the specs of a server's processes: their settings and sockets.

    Keys are not passed as flags, which every user of the machine can see. The router gets them in
    its environment; the others do not need them. Only what downloads models gets the user's token
    for the hub.
    """

    def __init__(self, options: Settings, run_dir: RunDir, joins: Sequence[str] = ()) -> None:
        """Engines join the routers at ``joins``; by default this server's own.

        The processes of this machine connect through private sockets. Others join at the configured
        ones.
        """
        self._options = options
        self._is_server = not joins
        joins = joins or [run_dir.socket("engines")]
        store = run_dir.socket("kvstore")
        if not self._is_server and options.kvstore_socket:
            store = options.kvstore_socket[0]
        self._private = [f"--engine-socket={address}" for address in joins]
        self._private.append(f"--kvstore-socket={store}")
        self._environment = _environment(run_dir)
        self._hub_tokens = {
            name: token for name in HUB_TOKENS if (token := os.environ.get(name)) is not None
        }

    def router(self, http: socket.socket) -> ChildSpec:
        flags = [f"--engine-socket={address}" for address in self._options.engine_socket]
        return self._spec(
            ROUTER,
            "services.processes.router",
            [*settings.command_line(self._options, of_router=True), *flags],
            environment={settings.SECRETS_VARIABLE: settings.secrets_of(self._options)},
            descriptors={HTTP_VARIABLE: http.fileno()},
            stop_signal=SERVER_ENDS,
            announces_ready=True,
            takes_hang_up=True,
        )

    def kvstore(self) -> ChildSpec:
        flags = [f"--kvstore-socket={address}" for address in self._options.kvstore_socket]
        flags = [*settings.command_line(self._options), *flags]
        return self._spec("kvstore", "services.processes.kvstore", flags, stop_stage=2)

    def engine(self, entry: ModelEntry, name: str, budget_bytes: int) -> ChildSpec:
        """Return the spec of an engine, which may use ``budget_bytes`` if there are several models.
        The engine of a single model determines its memory from the device."""
        budget = [] if entry.alone else [f"--memory-gb={budget_bytes / 1e9:.9f}"]
        return self._spec(
            name,
            "services.processes.engine",
            [*entry.arguments(), *budget],
            environment={
                **allocation.environment(os.environ),
                **self._hub_tokens,
                ENGINE_NAME_VARIABLE: name,
            },
            stop_stage=1,
            announces_ready=not self._is_server,
            essential=entry.alone,
            # Routers on other machines learn of a loss from the successor's first heartbeat.
            work=entry.id if self._is_server else "",
            # Ranks need another environment, which must be set before MLX is imported.
            spare=_command("services.processes.engine_spare") if entry.settings.ranks == 1 else (),
        )

    def model_jobs(self, launcher: Launcher) -> ModelJobs:
        """Return the object that downloads and deletes models, in processes that ``launcher``
        starts."""

        def start(kind: Kind, model: str) -> LaunchedProcess:
            spec = ChildSpec(
                name=kind,
                command=(*_command("services.processes.model_job"), kind, model),
                environment={**self._environment, **self._hub_tokens},
                hidden_variables=_HIDDEN,
            )
            return launcher.start(spec, time.monotonic())

        return ModelJobs(start)

    def _spec(
        self,
        name: str,
        module: str,
        flags: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        **fields: Any,
    ) -> ChildSpec:
        return ChildSpec(
            name=name,
            command=(*_command(module), *self._private, *flags),
            environment={**self._environment, **environment},
            hidden_variables=_HIDDEN,
            **fields,
        )


def _command(module: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", module)


def _environment(run_dir: RunDir) -> dict[str, str]:
    """Return the environment variables of all children."""
    return {
        RUN_DIR_VARIABLE: str(run_dir.path),
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def url(options: Settings, http: socket.socket) -> str:
    """Return the URL under which a client on this machine reaches the server."""
    local_url = base_url(http, tls=options.ssl_certfile is not None) + options.root_path
    return local_url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _supervise(
    argv: Sequence[str],
    given: Mapping[str, str],
    options: Settings,
    models: Sequence[ModelEntry],
    http: socket.socket,
    run_dir: RunDir,
    cluster: RayCluster | None = None,
) -> int:
    output = LogCollector(options.log_format)
    logs.setup("supervisor", options.log_level, options.log_format, output)
    log_access(logger, options)
    children = Children(options if cluster is None else cluster.prepared(options), run_dir)
    forget(settings.SECRET_VARIABLES | HUB_TOKENS)
    local = LocalLauncher(output, options.spare_engine_after_s)
    launcher: Launcher = local
    make_engine: SpecMaker = children.engine
    if cluster is not None:
        launcher = cluster.launcher(launcher, output)
        make_engine = cluster.placed(make_engine, options)
    services = [*([] if options.no_ssd else [children.kvstore()]), children.router(http)]

    bounded_log = BoundedLog(given)

    def tick() -> None:
        run_dir.keep_fresh()
        bounded_log.tick(time.monotonic())
        fleet.update()
        local.keep_spare(time.monotonic())

    def reload() -> None:
        nonlocal models
        found = _read_again(argv, given, models)
        if found is None:
            return
        new, models = found
        if fixed := settings.fixed_changes(options, new):
            names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(fixed))
            logger.warning("changing these settings requires a restart of the server: %s", names)
        fleet.reconfigure(new, models)

    supervisor = Supervisor(
        services,
        launcher,
        limits=Limits(drain_timeout_s=options.pre_stop_delay_s + options.drain_timeout_s + GRACE_S),
        on_ready=announcement(options, models, http),
        # From now on only the router has the socket, so that it can refuse connections.
        on_stopping=http.close,
        on_tick=tick,
        on_exit=lambda child: fleet.on_exit(child),
        on_hang_up=reload,
    )
    fleet = EngineFleet(supervisor, make_engine, options, models, children.model_jobs(local))
    try:
        code = supervisor.run()
    finally:
        fleet.close()
        local.close()
        output.close()
    if code in (EXIT_FAILED, EXIT_CONFIG):
        fail(PROG, f"run {PROG} doctor with the same flags to find the cause")
    return code


def _read_again(
    argv: Sequence[str], given: Mapping[str, str], served: Sequence[ModelEntry]
) -> tuple[Settings, Sequence[ModelEntry]] | None:
    """Return the settings and models as they are now, or log why they cannot be read, or replace
    those that are ``served``."""
    try:
        new, entries, _ = settings.read(argv, given, PROG)
    except Exception as error:  # no file may end a running server
        expected = isinstance(error, FlagError)
        logger.error("keeping the old settings: %s", error, exc_info=not expected)
        return None
    if entries[0].alone and not served[0].alone:  # the file may be only partly written
        logger.error("keeping the old settings: %s has no [[model]] any more", new.config)
        return None
    return new, entries


def announcement(
    options: Settings, models: Sequence[ModelEntry], http: socket.socket
) -> Callable[[], None]:
    """Return a function that prints, once the server is ready, where it is."""
    names = ", ".join(name for entry in models for name in entry.names)
    noun = "model" if len(models) == 1 else "models"
    address = url(options, http)
    began = time.monotonic()

    def announce_ready() -> None:
        took_s = time.monotonic() - began
        line = f"{PROG} ready: {address}  ({noun} {names}, after {took_s:.1f} s)\n"
        if sys.stdout.isatty():
            line += first_steps(options, models, address)
        announce(line)

    return announce_ready


def first_steps(options: Settings, models: Sequence[ModelEntry], address: str) -> str:
    """Return suggestions for using the server at ``address``, such as a curl command to paste."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}]}
    if len(models) > 1:
        body = {"model": models[0].id, **body}
    lines = [f"curl {shlex.quote(address)}/v1/chat/completions"]
    lines.append("  -H 'Content-Type: application/json'")
    if options.has_keys:
        lines.append('  -H "Authorization: Bearer $MLX_LM_SERVER_API_KEY"')
    lines.append(f"  -d {shlex.quote(json.dumps(body))}")
    curl = " \\\n  ".join(lines)
    more = [f"{PROG} chat --url {address}"]
    if not options.no_page:
        more.append(f"{address}/ in a browser: status and chat")
    return "\n  " + "\n\n  ".join([curl, "\n  ".join(more)]) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
