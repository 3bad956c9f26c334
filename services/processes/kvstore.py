"""The kvstore process: `python -m services.processes.kvstore --kvstore-socket ipc:///PATH`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from kvstore.directory import BlockDirectory, DirectoryInUse
from kvstore.server import Server
from kvstore.store import DiskStore
from kvstore.writer import Writer
from shared import logs
from shared.descriptors import raise_descriptor_limit
from shared.environment import HUB_TOKENS, forget
from shared.exits import EXIT_OK, EXIT_USAGE, fail
from shared.network.curve import CurveError, Gatekeeper
from shared.network.socket_file import SocketFile, SocketFileError
from shared.settings import SECRET_VARIABLES, Settings, parse
from shared.supervisor_link import SupervisorLink

PROG = "mlx-lm-server kvstore"
ABOUT = "Run an SSD cache for the engines at --kvstore-socket."
HEARTBEAT_EVERY_S = 3.0
FLUSH_S = 10.0
"""Max time to write the queued blocks at exit."""
ORPHAN_FLUSH_S = 2.0
"""The same if the supervisor is gone: shorter, because the other processes exit too."""

_MAX_SERVERS = 8
_DAY_S = 86400.0
_LOAD_AGAIN_S = 2.0
"""Pause before the index is loaded again because the process lacked descriptors."""
logger = logging.getLogger("kvstore")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or the end of the supervisor; return the exit code."""
    settings = parse(sys.argv[1:] if argv is None else argv, os.environ, PROG, about=ABOUT)
    raise_descriptor_limit()
    forget(SECRET_VARIABLES | HUB_TOKENS)
    link = SupervisorLink.from_environment()
    logs.setup("kvstore", settings.log_level, settings.log_format)
    if not settings.kvstore_socket:
        return fail(PROG, "--kvstore-socket is required for a standalone kvstore", EXIT_USAGE)
    try:
        files = [SocketFile(endpoint) for endpoint in settings.kvstore_socket]
    except SocketFileError as error:
        return fail(PROG, f"--kvstore-socket: {error}")
    stop = _StopRequest()
    stop.on_signals()
    try:
        directory = _open_directory(settings)
    except DirectoryInUse as error:
        return fail(PROG, f"--ssd-cache-dir: {error}")
    except OSError as error:
        reason = f"{settings.ssd_cache_dir}: {error.strerror}; use another directory, or --no-ssd"
        return fail(PROG, f"--ssd-cache-dir: {reason}")
    store = _make_store(settings, directory)
    writer = _make_writer(settings, store)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        server = Server(
            context,
            settings.kvstore_socket,
            directory,
            store,
            writer,
            acknowledges_early=settings.ssd_async_writes and not writer.persistent,
            gatekeeper=_gatekeeper(settings, context),
        )
    except zmq.ZMQError as error:
        directory.close()
        addresses = ", ".join(settings.kvstore_socket)
        return fail(PROG, f"--kvstore-socket: cannot bind {addresses}: {error}")
    except CurveError as error:
        directory.close()
        return fail(PROG, f"--curve-dir: {error}")
    threading.Thread(target=load_index, args=(store,), name="indexer", daemon=True).start()
    if link:
        link.watch(lambda: stop.request(ORPHAN_FLUSH_S))
    logger.info("storing blocks in %s", directory.root)
    _serve(server, link, stop)
    writer.close(stop.flush_s)
    server.send_replies()
    server.close()
    context.term()
    for file in files:
        file.remove()
    directory.close()
    return EXIT_OK


def _open_directory(settings: Settings) -> BlockDirectory:
    """Open the directory of blocks. A second server on a machine uses one next to the default.

    Raises: `DirectoryInUse` and OSError.
    """
    first = settings.ssd_cache_dir
    others = () if "ssd_cache_dir" in settings.given else range(2, _MAX_SERVERS + 1)
    for path in (first, *(first.with_name(f"{first.name}-{number}") for number in others)):
        try:
            directory = BlockDirectory(path)
        except DirectoryInUse as error:
            reason = error
            continue
        if path != first:
            logger.warning("another server uses %s: storing blocks in %s", first, path)
        return directory
    raise DirectoryInUse(f"{reason}; use another directory for this server, or --no-ssd")


class _StopRequest:
    """A stop that may be requested several times; the shortest time to flush applies."""

    def __init__(self) -> None:
        self.is_requested = False
        self.flush_s = FLUSH_S
        self.wake: Callable[[], None] = lambda: None
        """Ends the wait for messages. Called on any thread and in signal handlers."""

    def on_signals(self) -> None:
        """Let signals that end a process request a stop."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, lambda *_: self.request(FLUSH_S))

    def request(self, flush_s: float) -> None:
        self.flush_s = min(self.flush_s, flush_s)
        self.is_requested = True
        self.wake()


def _serve(server: Server, link: SupervisorLink | None, stop: _StopRequest) -> None:
    next_heartbeat, stop.wake = 0.0, server.wake
    while not stop.is_requested:
        if link and time.monotonic() >= next_heartbeat:
            link.heartbeat("ready")
            next_heartbeat = time.monotonic() + HEARTBEAT_EVERY_S
        server.serve(max(0.0, next_heartbeat - time.monotonic()) if link else HEARTBEAT_EVERY_S)
    if link:
        link.heartbeat("draining")  # the last one, before queued blocks are written


def _gatekeeper(settings: Settings, context: zmq.Context[zmq.Socket[bytes]]) -> Gatekeeper | None:
    """Raises `CurveError`. Keys restricted to some models are refused: blocks may belong to any
    model, and the store cannot tell which."""
    over_tcp = any(endpoint.startswith("tcp:") for endpoint in settings.kvstore_socket)
    if settings.curve_dir is None or not over_tcp:
        return None
    return Gatekeeper(context, settings.curve_dir, any_model_only=True)


def _make_store(settings: Settings, directory: BlockDirectory) -> DiskStore:
    return DiskStore(
        directory,
        max_bytes=int(settings.ssd_max_size_gb * 1e9),
        reserve_bytes=int(settings.disk_reserve_gb * 1e9),
        ttl_s=settings.ssd_ttl_days * _DAY_S,
    )


def _make_writer(settings: Settings, store: DiskStore) -> Writer:
    return Writer(
        store,
        persistent=settings.ssd_durability == "persistent",
        queue_size=settings.ssd_writer_queue_size,
        max_retries=settings.ssd_persistent_max_retries,
        flush_interval_s=settings.ssd_flush_interval_s,
    )


def load_index(store: DiskStore) -> None:
    """Load the index of ``store``, however long it takes, and log what is in it."""
    started = time.monotonic()
    while True:
        try:
            store.load()
            break
        except OSError as error:
            logger.warning("cannot look for blocks yet: %s", error)
            time.sleep(_LOAD_AGAIN_S)
    stats = store.stats()
    took_s = time.monotonic() - started
    logger.info("found %d blocks, %.1f GB, in %.1f s", stats.blocks, stats.bytes / 1e9, took_s)


if __name__ == "__main__":
    raise SystemExit(main())
