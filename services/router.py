"""The router process: `python -m services.router --engine-socket ipc:///PATH`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from router.fleet.core import Router
from router.fleet.port import PortError
from router.http.app import create_app
from router.http.connections import Connection
from router.http.front import Keys
from shared import logs
from shared.exits import EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from shared.link import HTTP_VARIABLE, SupervisorLink
from shared.settings import parse

PROG = "mlx-lm-server router"
BEAT_EVERY_S = 0.5
BACKLOG = 2048
FLUSH_S = 5
"""How long the last events may take to reach the clients after a drain."""
KEEP_ALIVE_S = 75

logger = logging.getLogger("router")


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or the supervisor's end; returns the exit code."""
    settings = parse(sys.argv[1:] if argv is None else argv, os.environ, PROG)
    link = SupervisorLink.from_environment()
    logs.setup("router", settings.log_level, settings.log_format)
    if settings.engine_socket is None:
        return _refuse("--engine-socket: needed by a router that is started alone", EXIT_USAGE)
    try:
        keys = Keys.from_settings(settings)
        listener = _inherited_listener() or _bind(settings.host, settings.port)
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    try:
        router = Router(settings, settings.engine_socket, _version())
    except PortError as error:
        listener.close()
        return _refuse(f"--engine-socket: {error}")
    try:
        server = _server(router, keys)
    except (ssl.SSLError, OSError) as error:
        listener.close()
        router.port.close()
        return _refuse(f"--ssl-certfile, --ssl-keyfile: {error}")
    # uvloop, where there is one: asyncio's own loop takes twice the time for a token.
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, router, listener, link))
    return EXIT_OK


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: during a drain it still has to answer, with 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(router: Router, keys: Keys) -> _Server:
    settings = router.settings
    config = uvicorn.Config(
        create_app(router, keys),
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    config.load()
    return _Server(config)


async def _serve(
    server: _Server, router: Router, listener: socket.socket, link: SupervisorLink | None
) -> None:
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    async def drain() -> None:
        await router.drain(router.settings.drain_timeout_s)
        server.should_exit = True

    def stop() -> None:
        """The first time after a drain, the second time at once."""
        if stopping:
            stop_now()
        else:
            logger.info("draining")
            stopping.append(asyncio.create_task(drain()))

    def stop_now() -> None:
        router.cut("The server is shutting down.")
        server.should_exit = server.force_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if link is not None:
        link.watch(lambda: _orphaned(loop, stop_now))
    beats = asyncio.create_task(_beat(router, link))
    await router.start()
    try:
        host, port = listener.getsockname()[:2]
        scheme = "https" if server.config.is_ssl else "http"
        logger.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
        await server.serve(sockets=[listener])
    finally:
        for task in [beats, *stopping]:
            task.cancel()
        await router.stop()


def _orphaned(loop: asyncio.AbstractEventLoop, stop_now: Callable[[], None]) -> None:
    """On the link's thread: the supervisor is gone, and with it who would kill us."""
    threading.Timer(FLUSH_S, os._exit, (1,)).start()
    loop.call_soon_threadsafe(stop_now)


async def _beat(router: Router, link: SupervisorLink | None) -> None:
    """Tells the supervisor that the event loop turns; "ready" once requests are served."""
    was_ready = False
    while link is not None:
        was_ready = was_ready or any(m.ready_engines for m in router.registry.models.values())
        link.beat("draining" if router.draining else "ready" if was_ready else "loading")
        await asyncio.sleep(BEAT_EVERY_S)


def _inherited_listener() -> socket.socket | None:
    number = os.environ.pop(HTTP_VARIABLE, None)
    if number is None:
        return None
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    return listener


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with a line that names host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"--host, --port: cannot listen on {host}:{port}: {error}") from None
    return listener


def _version() -> str:
    try:
        return importlib.metadata.version("mlx-lm-server")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _refuse(why: str, code: int = EXIT_CONFIG) -> int:
    sys.stderr.write(f"{PROG}: {why}\n")
    return code


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's exit: MLX, which the tokenizers bring in, may crash
    # there when it was imported on another thread.
    os._exit(code)
