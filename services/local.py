"""`mlx-lm-server serve`: all processes of a server on one machine, as children of this one."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.backend import allocation
from services.listener import ListenError, base_url, listen
from services.supervisor import Limits, Supervisor
from services.supervisor_child import ChildSpec
from services.supervisor_output import LogCollector
from shared import logs, settings
from shared.descriptors import raise_descriptor_limit
from shared.exits import EXIT_FAILED, fail
from shared.rundir import RUN_DIR_VARIABLE, RunDir, RunDirError
from shared.settings import Settings
from shared.supervisor_link import ENGINE_NAME_VARIABLE, HTTP_VARIABLE

logger = logging.getLogger(__name__)

PROG = "mlx-lm-server"
_GRACE_S = 5.0
"""The time beyond --drain-timeout-s that a child has to end by itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    options = settings.parse(argv, os.environ, PROG)
    raise_descriptor_limit()
    try:
        # The socket is made here and not in the router, so that connections wait, and are not
        # refused, while the router is restarted.
        with listen(options.host, options.port) as http, RunDir.create() as run_dir:
            return _supervise(options, argv, http, run_dir)
    except (ListenError, RunDirError) as error:
        return fail(PROG, error, EXIT_FAILED)


def children(
    options: Settings, argv: Sequence[str], http: socket.socket, run_dir: RunDir
) -> list[ChildSpec]:
    """Return the processes of one server. They get the supervisor's own flags, and the sockets.

    Keys are left out of the flags, which every user of the machine can see. The router gets them
    in its environment; the others have no use for them.
    """
    engine_socket = options.engine_socket or run_dir.socket("engines")
    kvstore_socket = options.kvstore_socket or run_dir.socket("kvstore")
    flags = [
        *settings.without_secrets(argv),
        f"--engine-socket={engine_socket}",
        f"--kvstore-socket={kvstore_socket}",
    ]
    environment = _environment(run_dir)
    hidden = settings.secret_variables()

    def command(module: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", module, *flags)

    router = ChildSpec(
        name="router",
        command=command("services.router"),
        environment={**environment, settings.SECRETS_VARIABLE: settings.secrets_of(options)},
        hidden_variables=hidden,
        descriptors={HTTP_VARIABLE: http.fileno()},
        announces_ready=True,
        takes_hang_up=True,
    )
    engines = [
        ChildSpec(
            name=f"engine-{number}",
            command=command("services.engine"),
            environment={
                **environment,
                **allocation.environment(os.environ),
                ENGINE_NAME_VARIABLE: f"engine-{number}",
            },
            hidden_variables=hidden,
            stop_stage=1,
        )
        for number in range(options.engines)
    ]
    kvstore = ChildSpec(
        name="kvstore",
        command=command("services.kvstore"),
        environment=environment,
        hidden_variables=hidden,
        stop_stage=2,
    )
    return [*([] if options.no_ssd else [kvstore]), *engines, router]


def _environment(run_dir: RunDir) -> dict[str, str]:
    """Return the variables that all children get."""
    root = str(Path(__file__).resolve().parent.parent)
    return {
        RUN_DIR_VARIABLE: str(run_dir.path),
        # Our packages have plain names. With -P and this path, a folder of the same name in
        # the working directory is not imported in place of one of them.
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def url(options: Settings, http: socket.socket) -> str:
    """Return the URL under which a client on this machine reaches the server."""
    local_url = base_url(http, tls=options.ssl_certfile is not None) + options.root_path
    return local_url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _supervise(options: Settings, argv: Sequence[str], http: socket.socket, run_dir: RunDir) -> int:
    output = LogCollector(options.log_format)
    logs.setup("supervisor", options.log_level, options.log_format, output)
    supervisor = Supervisor(
        children(options, argv, http, run_dir),
        output,
        limits=Limits(drain_timeout_s=options.drain_timeout_s + _GRACE_S),
        on_ready=_make_announcement(options, http),
        # From now on only the router has the socket, so that it can refuse connections.
        on_stopping=http.close,
        on_turn=run_dir.keep_fresh,
    )
    try:
        return supervisor.run()
    finally:
        output.close()


def _make_announcement(options: Settings, http: socket.socket) -> Callable[[], None]:
    names = ", ".join(options.served_model_name or (options.model,))
    line = f"{PROG} ready: {url(options, http)}  (model {names})\n"

    def announce() -> None:
        try:
            sys.stdout.write(line)
            sys.stdout.flush()
        except OSError:
            logger.info("%s", line.strip())  # stdout is closed

    return announce


if __name__ == "__main__":
    sys.exit(main())
