"""The router process: `python -m services.processes.router --engine-socket ipc:///PATH`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from router.batches.directory import BatchDirectoryError
from router.fleet.background import BackgroundTasks
from router.fleet.demand import demand, load
from router.fleet.engines.socket import EngineSocketError
from router.fleet.router import Router
from router.fleet.tenants.rate_windows import LimitsStoreError
from router.http.acceptor import Acceptor, AddressLimit
from router.http.app import create_app
from router.http.certificates import follow_certificate
from router.http.connections import Connection
from router.http.endpoints.health import can_answer
from router.http.middleware.api_keys import ApiKeys
from router.responses.archive import ArchiveError
from router.tokens.without_mlx import leave_out_mlx
from services.processes.awake import Awake
from services.processes.listener import (
    BACKLOG,
    ListenError,
    base_url,
    inherited,
    listen,
    log_access,
)
from services.processes.router_end import RouterEnd
from services.processes.terminal import Terminal
from shared import logs
from shared.descriptors import raise_descriptor_limit, reserve
from shared.environment import HUB_TOKENS, forget
from shared.exits import EXIT_OK, EXIT_USAGE, fail
from shared.imports.transformers_index import remember_transformers
from shared.network.host_names import is_loopback
from shared.settings import SECRET_VARIABLES, parse
from shared.supervisor_link import SupervisorLink
from shared.tracing import Tracing, TracingUnavailable, open_tracing
from shared.version import installed_version

PROG = "mlx-lm-server router"
ABOUT = "Run a router for engines that join at --engine-socket."
STARTING_HEARTBEAT_EVERY_S = 0.5
MODELS_TIMEOUT_S = 10.0
FLUSH_S = 5
"""Max time for the last events to reach the clients after a drain."""
KEEP_ALIVE_S = 75
SWITCH_INTERVAL_S = 0.0001

logger = logging.getLogger("router")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or the end of the supervisor; return the exit code."""
    settings = parse(sys.argv[1:] if argv is None else argv, os.environ, PROG, about=ABOUT)
    forget(SECRET_VARIABLES | HUB_TOKENS)
    max_descriptors = raise_descriptor_limit()
    leave_out_mlx()
    remember_transformers()
    link = SupervisorLink.from_environment()
    logs.setup("router", settings.log_level, settings.log_format)
    if not settings.engine_socket:
        return fail(PROG, "--engine-socket is required for a standalone router", EXIT_USAGE)
    try:
        keys = ApiKeys(settings)
        tracing = open_tracing(settings.otlp_endpoint, "router")
        listener = inherited() or listen(settings.listen_host, settings.port)
    except TracingUnavailable as error:
        return fail(PROG, f"--otlp-endpoint: {error}")
    except (OSError, ValueError, ListenError) as error:
        return fail(PROG, error)
    try:
        router = Router(settings, settings.engine_socket, installed_version(), link)
    except (EngineSocketError, LimitsStoreError) as error:
        listener.close()
        flag = "--limits-url: " if isinstance(error, LimitsStoreError) else ""
        return fail(PROG, f"{flag}{error}")
    try:
        server = _server(router, keys, tracing, max_descriptors)
    except BatchDirectoryError as error:
        return fail(PROG, f"--batch-dir: {error}")
    except ArchiveError as error:
        return fail(PROG, f"--response-store-dir: {error}")
    except (ssl.SSLError, OSError) as error:
        listener.close()
        router.engine_sockets.close()
        return fail(PROG, f"--ssl-certfile, --ssl-keyfile: {error}")
    if link is None:
        log_access(logger, settings)
    # Threads that tokenize and parse (`router.tokens.work_pool`) hold the interpreter for this long
    # when the event loop wants it, and the loop releases it in each system call: with the default
    # of 5 ms, a first token that needs twenty turns of the loop waits 100 ms.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Use uvloop if it is installed: asyncio's own loop takes twice as long per token.
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, router, keys, listener, link))
    if tracing is not None:
        tracing.close()
    return EXIT_OK


class _Server(uvicorn.Server):
    """A server that leaves signals to `_serve`: during a drain it still answers, with 503.

    uvicorn checks ten times per second whether it should exit, and sets the date header; this
    server is notified, and `_heartbeat` sets the date."""

    def __init__(
        self,
        config: uvicorn.Config,
        max_descriptors: int,
        on_refused: Callable[[], None],
        address_limit: AddressLimit,
    ) -> None:
        self._exit = asyncio.Event()
        self._address_limit = address_limit
        self._max_descriptors, self._on_refused = max_descriptors, on_refused
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on ``sockets``."""
        config = self.config

        def connection() -> Connection:
            return Connection(config, self.server_state, self.lifespan.state)

        self.servers = [
            Acceptor(  # type: ignore[misc]
                each,
                connection,
                config.ssl,
                self._max_descriptors,
                self._on_refused,
                self._address_limit,
            )
            for each in sockets or []
        ]
        self.started = True

    @property
    def should_exit(self) -> bool:
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()
        else:
            self._exit.clear()

    async def main_loop(self) -> None:
        await self.set_date()
        await self._exit.wait()

    async def set_date(self) -> None:
        await self.on_tick(0)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(
    router: Router, keys: ApiKeys, tracing: Tracing | None, max_descriptors: int
) -> _Server:
    settings = router.settings
    config = uvicorn.Config(
        create_app(router, keys, tracing),
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # uvicorn would believe every program on this machine
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    config.load()
    limit = settings.max_connections_per_address
    if limit is None:
        limit = (max_descriptors - reserve(max_descriptors)) // 2
    address_limit = AddressLimit(limit, settings.trusted_proxy)
    refused = router.metrics.connections_refused.inc
    return _Server(config, max_descriptors, refused, address_limit)


async def _serve(
    server: _Server,
    router: Router,
    keys: ApiKeys,
    listener: socket.socket,
    link: SupervisorLink | None,
) -> None:
    loop = asyncio.get_running_loop()
    terminal = Terminal()
    end = RouterEnd(server, router, is_supervised=link is not None)

    def hang_up() -> None:
        if link is None and terminal.is_closed():
            end.drain()
        else:
            keys.reload_soon()

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    if link is not None:
        _follow(link, loop, router, end.at_once)
    addresses = router.settings.engine_socket
    if router.settings.curve_dir is None and any(one.startswith("tcp:") for one in addresses):
        logger.warning(
            "every process on this machine can join --engine-socket as an engine and read "
            "prompts: use ipc://, or tcp:// with --curve-dir"
        )
    background = BackgroundTasks()
    background.start(_heartbeat(server, router, link), keys.follow())
    settings, tls = router.settings, server.config.ssl
    if tls is not None and settings.ssl_certfile is not None:
        background.start(follow_certificate(tls, settings.ssl_certfile, settings.ssl_keyfile))
    await router.start()
    try:
        logger.info("listening on %s", base_url(listener, tls=server.config.is_ssl))
        if not keys and not is_loopback(listener.getsockname()[0]):
            logger.warning(
                "no API key is set: everyone who can reach this machine can use the models (set "
                "keys with --api-key-file, or restrict access with --host 127.0.0.1)"
            )
        if link is not None:
            await _models_received(router)
        await server.serve(sockets=[listener])
    finally:
        end.cancel()
        await background.stop()
        await router.stop()


def _follow(
    link: SupervisorLink,
    loop: asyncio.AbstractEventLoop,
    router: Router,
    stop_now: Callable[[], None],
) -> None:
    """Handle the supervisor's messages, and stop once it is gone."""

    def take(message: Mapping[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed because the process is exiting
            loop.call_soon_threadsafe(router.on_supervisor_message, message)

    link.watch(lambda: _on_supervisor_gone(loop, stop_now), take)


async def _models_received(router: Router) -> None:
    """Wait for the supervisor's list of models. Until then, requests would get the answer that
    there are none; connections wait in the socket."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(router.supervised.models_received.wait(), MODELS_TIMEOUT_S)


def _on_supervisor_gone(loop: asyncio.AbstractEventLoop, stop_now: Callable[[], None]) -> None:
    """Stop at once. A timer ends a process that hangs, because there is no supervisor to kill it.

    Called on the link's thread.
    """
    threading.Timer(FLUSH_S, os._exit, (1,)).start()
    loop.call_soon_threadsafe(stop_now)


async def _heartbeat(server: _Server, router: Router, link: SupervisorLink | None) -> None:
    """Set the date header, keep a Mac awake, and tell the supervisor that the event loop runs;
    "ready" once requests are served. The router's own timer is the only one: an idle server wakes
    up less often."""
    was_ready, awake = False, Awake.here()
    while True:
        await server.set_date()
        if awake is not None:
            awake.update(router.dispatcher.num_in_flight > 0)
        was_ready = was_ready or can_answer(router)
        phase = "draining" if router.draining else "ready" if was_ready else "loading"
        if link is not None:
            link.heartbeat(phase, models=demand(router), load=load(router))
        with contextlib.suppress(TimeoutError):
            timeout_s = None if was_ready else STARTING_HEARTBEAT_EVERY_S
            await asyncio.wait_for(router.supervised.heartbeat_due.wait(), timeout_s)
        router.supervised.heartbeat_due.clear()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the shutdown of the interpreter, which waits for threads that are still tokenizing.
    os._exit(code)
