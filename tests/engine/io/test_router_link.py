"""The link to a router over tcp with CURVE: refused at first, and let in later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from engine.io.router_link import RouterLink
from shared import wire
from shared.network.allow_list import AllowedKey, write_allow_list
from shared.network.curve import ALLOW_LIST, EngineKeys, Gatekeeper, create_pair

PATIENCE_S = 20
Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@contextmanager
def guarded_router(directory: Path) -> Iterator[Socket]:
    """Yield a router's socket that admits the engines on the allow list in ``directory``."""
    routers: Context = zmq.Context()
    gatekeeper = Gatekeeper(routers, directory)
    socket = routers.socket(zmq.ROUTER)
    gatekeeper.protect(socket)
    socket.bind("tcp://127.0.0.1:*")
    gatekeeper.start()
    try:
        yield socket
    finally:
        gatekeeper.close()
        routers.destroy(linger=0)


def follow(link: RouterLink, until: Callable[[], bool]) -> None:
    """Let the link take note of events, as the IO thread does, until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline
        if link.monitor.poll(20):
            link.on_event()


def test_a_refused_engine_asks_again_and_says_why_once(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, own = create_pair(tmp_path, "server"), create_pair(tmp_path, "engine")
    with guarded_router(tmp_path) as socket:
        keys = EngineKeys(own, server.public)
        link = RouterLink(context, socket.get_string(zmq.LAST_ENDPOINT), keys)
        with closing(link):
            with caplog.at_level(logging.ERROR):
                for _ in range(3):
                    asked = len(caplog.records)
                    follow(link, lambda: link.asks_again)
                    link.tick(time.monotonic() + 60)
            assert asked == 1
            assert f"the key {own.public} of this engine is not on its allow list" in caplog.text
            write_allow_list(tmp_path / ALLOW_LIST, [AllowedKey(own.public, "late")])
            follow(link, lambda: link.asks_again or link.is_connected)
            link.tick(time.monotonic() + 60)
            follow(link, lambda: link.is_connected)
            link.post(wire.Bye(engine="e", incarnation="i"))
            assert link.flush()
            assert socket.poll(1000 * PATIENCE_S)


def test_an_engine_without_keys_says_what_is_missing(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_pair(tmp_path, "server")
    with guarded_router(tmp_path) as socket:
        link = RouterLink(context, socket.get_string(zmq.LAST_ENDPOINT), None)
        with closing(link):
            follow(link, lambda: "it requires CURVE: set --curve-dir" in caplog.text)
