"""All processes of a server on one machine, as children of this one."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.backend import allocation
from services.supervisor import EXIT_FAILED, Limits, Supervisor
from services.supervisor_child import ChildSpec
from services.supervisor_output import Output
from shared import logs, settings
from shared.link import ENGINE_NAME_VARIABLE, HTTP_VARIABLE
from shared.rundir import RUN_DIR_VARIABLE, RunDir, RunDirError
from shared.settings import Settings

logger = logging.getLogger(__name__)

PROG = "mlx-lm-server"
BACKLOG = 1024
_GRACE_S = 5.0
"""What a child may take beyond --drain-timeout-s to end by itself."""


class CannotListen(Exception):
    """The HTTP address cannot be used; the message is one line for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    options = settings.parse(argv, os.environ, PROG)
    try:
        with listen(options.host, options.port) as http, RunDir.create() as run_dir:
            return _supervise(options, argv, http, run_dir)
    except (CannotListen, RunDirError) as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return EXIT_FAILED


def listen(host: str, port: int) -> socket.socket:
    """The listening HTTP socket.

    It is made here and not in the router, so that connections wait, and are not
    refused, while the router is started again. Raises `CannotListen`.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CannotListen(f"--host: {host!r} cannot be resolved ({reason})") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(f"--port: {port} is in use by another program") from None
        flag = "--port" if error.errno == errno.EACCES else "--host"
        raise CannotListen(f"{flag}: cannot listen on {host}:{port} ({error.strerror})") from None
    return listener


def children(
    options: Settings, argv: Sequence[str], http: socket.socket, run_dir: RunDir
) -> list[ChildSpec]:
    """The processes of one server. They get the supervisor's own flags, and the sockets."""
    engine_socket = options.engine_socket or run_dir.socket("engines")
    kvstore_socket = options.kvstore_socket or run_dir.socket("kvstore")
    flags = [*argv, f"--engine-socket={engine_socket}", f"--kvstore-socket={kvstore_socket}"]
    root = str(Path(__file__).resolve().parent.parent)
    environment = {
        RUN_DIR_VARIABLE: str(run_dir.path),
        # Our packages have plain names: with -P and this, a folder of the same name
        # where the user happens to stand is not taken for one of them.
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }

    def command(module: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", module, *flags)

    router = ChildSpec(
        name="router",
        command=command("services.router"),
        environment=environment,
        descriptors={HTTP_VARIABLE: http.fileno()},
        announces_ready=True,
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
            stop_stage=1,
        )
        for number in range(options.engines)
    ]
    kvstore = ChildSpec(
        name="kvstore",
        command=command("services.kvstore"),
        environment=environment,
        stop_stage=2,
    )
    return [*([] if options.no_ssd else [kvstore]), *engines, router]


def url(options: Settings, http: socket.socket) -> str:
    """Where a client on this machine reaches the server."""
    host, port = http.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{options.root_path}"


def _supervise(options: Settings, argv: Sequence[str], http: socket.socket, run_dir: RunDir) -> int:
    output = Output(options.log_format)
    logs.setup("supervisor", options.log_level, options.log_format, output)
    supervisor = Supervisor(
        children(options, argv, http, run_dir),
        output,
        limits=Limits(drain_s=options.drain_timeout_s + _GRACE_S),
        on_ready=_announcement(options, http),
        # The router is the only one who accepts, and so can refuse, from now on.
        on_stopping=http.close,
    )
    try:
        return supervisor.run()
    finally:
        output.close()


def _announcement(options: Settings, http: socket.socket) -> Callable[[], None]:
    names = ", ".join(options.served_model_name or (options.model,))
    line = f"{PROG} ready: {url(options, http)}  (model {names})\n"

    def announce() -> None:
        try:
            sys.stdout.write(line)
            sys.stdout.flush()
        except OSError:
            logger.info("%s", line.strip())  # nobody reads our stdout

    return announce


if __name__ == "__main__":
    sys.exit(main())
