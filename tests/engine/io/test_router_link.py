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
from shared.network.curve import ALLOW_LIST, EngineKeyFiles, create_pair
from tests.shared.network.test_curve import guarded

PATIENCE_S = 20
Socket = zmq.Socket[bytes]


@contextmanager
def guarded_link(directory: Path, *, has_keys: bool = True) -> Iterator[tuple[Socket, RouterLink]]:
    """Yield a router's socket that admits the engines on the allow list in ``directory``, and an
    engine's link to it, with keys from there."""
    create_pair(directory, "server")
    context: zmq.Context[Socket] = zmq.Context()
    keys = EngineKeyFiles(directory) if has_keys else None
    with guarded(directory) as (_, socket):
        with closing(RouterLink(context, socket.get_string(zmq.LAST_ENDPOINT), keys)) as link:
            yield socket, link
        context.destroy(linger=0)


def follow(link: RouterLink, until: Callable[[], bool]) -> None:
    """Let the link take note of events, as the IO thread does, until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline
        if link.monitor.poll(20):
            link.on_event()


def allow(directory: Path, key: str) -> None:
    write_allow_list(directory / ALLOW_LIST, [AllowedKey(key, "studio")])


def replace_keys(directory: Path) -> str:
    """Replace the engine's keys; return the public one."""
    for name in ("engine.key", "engine.secret"):
        (directory / name).unlink()
    return create_pair(directory, "engine").public


def test_a_refused_engine_asks_again_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = create_pair(tmp_path, "engine")
    with guarded_link(tmp_path) as (socket, link):
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                asked = len(caplog.records)
                follow(link, lambda: link.asks_again)
                link.tick(time.monotonic() + 60, is_idle=False)
        assert asked == 1
        assert f"the key {own.public} of this engine is not on its allow list" in caplog.text
        allow(tmp_path, own.public)
        follow(link, lambda: link.asks_again or link.is_connected)
        link.tick(time.monotonic() + 60, is_idle=False)
        follow(link, lambda: link.is_connected)
        link.post(wire.Bye(engine="e", incarnation="i"))
        assert link.flush()
        assert socket.poll(1000 * PATIENCE_S)


def test_an_engine_without_keys_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with guarded_link(tmp_path, has_keys=False) as (_, link):
        follow(link, lambda: "it requires CURVE: set --curve-dir" in caplog.text)


def test_replaced_keys_are_used_once_no_request_is_running(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    allow(tmp_path, create_pair(tmp_path, "engine").public)
    with guarded_link(tmp_path) as (socket, link):
        follow(link, lambda: link.is_connected)
        secret = (tmp_path / "engine.secret").read_bytes()
        new = replace_keys(tmp_path)
        (tmp_path / "engine.secret").rename(tmp_path / "new")
        (tmp_path / "engine.secret").write_bytes(secret)
        link.tick(time.monotonic() + 60, is_idle=True)
        assert link.is_connected, "only one of the two files was replaced"
        assert "cannot use the new keys yet" in caplog.text
        (tmp_path / "new").rename(tmp_path / "engine.secret")
        (tmp_path / "engine.secret").chmod(0o600)
        allow(tmp_path, new)
        link.tick(time.monotonic() + 90, is_idle=False)
        assert link.is_connected
        link.tick(time.monotonic() + 120, is_idle=True)
        assert not link.is_connected
        follow(link, lambda: link.is_connected)
        link.post(wire.Bye(engine="e", incarnation="i"))
        assert link.flush() and socket.poll(1000 * PATIENCE_S)
        assert socket.recv_multipart(copy=False)[-1].get("User-Id") == new


def test_an_engine_that_is_refused_tries_the_keys_that_its_directory_has_now(
    tmp_path: Path,
) -> None:
    create_pair(tmp_path, "engine")
    with guarded_link(tmp_path) as (_, link):
        follow(link, lambda: link.asks_again)
        allow(tmp_path, replace_keys(tmp_path))
        link.tick(time.monotonic() + 60, is_idle=False)
        follow(link, lambda: link.is_connected)
