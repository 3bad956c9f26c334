"""Clients that use up the descriptors of the router."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.http import acceptor
from router.http.acceptor import Acceptor, AddressLimit, EndingProtocol
from services.commands import keys
from shared.network.curve import EngineKeys
from tests.router.conftest import StartServer, eventually, text_of
from tests.router.scripted_engine import ScriptedEngine

LIMIT = 256
ENGINES = 3


@contextmanager
def flood(address: Any, count: int) -> Iterator[list[socket.socket]]:
    """Open ``count`` connections that say nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


def is_ended(client: socket.socket) -> bool:
    """Return whether the server has closed a connection, possibly after a greeting."""
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_flood_of_connections_leaves_descriptors_for_engines(start_server: StartServer) -> None:
    """An engine that joins when there is no descriptor left would be the end of the router."""
    server = start_server("--max-connections-per-address=0", max_descriptors=LIMIT)
    engine = server.join("hello world", hold_tokens_after=1)
    streamed = server.begin("x", stream=True)
    eventually(lambda: len(engine.running) == 1)
    http = (server.client.base_url.host, server.client.base_url.port)
    with flood(http, LIMIT + 50) as clients:
        eventually(lambda: any(map(is_ended, clients)))
        for number in range(ENGINES):
            server.start_engine("hello world", name=f"late-{number}")
        eventually(lambda: server.log.read_text().count("is ready") == 1 + ENGINES)
        engine.behaviour.hold_tokens_after = None
        assert "[DONE]" in streamed.result(60).text
        assert sum(map(is_ended, clients)) < LIMIT
    eventually(lambda: text_of(server.chat("x")) == "hello world")
    assert server.metric("connections_refused_total ") > 50
    assert server.log.read_text().count("closed a new connection") == 1
    assert "the others are reserved for engines" in server.log.read_text()
    assert server.stop() == 0


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_flood_of_the_address_for_other_machines_needs_no_key_and_does_no_harm(
    start_server: StartServer, tmp_path: Path, free_port: int, encrypted: bool
) -> None:
    assert keys.main(["init", f"--curve-dir={tmp_path}"]) == 0
    own, name = (EngineKeys.load(tmp_path), "native.mine") if encrypted else (None, "mine")
    address = f"tcp://127.0.0.1:{free_port}"
    flags = [f"--engine-socket={address}", *([f"--curve-dir={tmp_path}"] if encrypted else [])]
    server = start_server(*flags, max_descriptors=LIMIT)
    with flood(("127.0.0.1", free_port), LIMIT) as clients:
        eventually(lambda: sum(map(is_ended, clients)) > LIMIT / 2)
        assert not all(map(is_ended, clients))
        if encrypted:
            assert server.metric('engines_refused_total{reason="connections"}') > LIMIT / 2
        server.join("hello world")
        assert text_of(server.chat("x")) == "hello world"
    assert server.log.read_text().count("closed a new connection to tcp://") == 1
    mine = ScriptedEngine(address, server.model_dir, says="hi", name="mine", keys=own)
    server.engines.append(mine)
    eventually(lambda: f"engine {name} is ready" in server.log.read_text())
    assert server.stop() == 0


class ExhaustedListener(socket.socket):
    """A listener that fails for want of descriptors once."""

    failures = 1

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_accepting_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_PAUSE_S", 0.1)

    class Greeting(EndingProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hello")
            transport.close()

    async def connect() -> bytes:
        with ExhaustedListener() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            accepting = Acceptor(listener, Greeting, None, 1000, lambda: None, AddressLimit(0, ()))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            greeting = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            accepting.close()
            return greeting

    assert asyncio.run(connect()) == b"hello"
