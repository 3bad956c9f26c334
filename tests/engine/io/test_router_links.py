"""An engine that joins the routers of a name, which come and go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from engine.io import thread
from engine.io.inbox import Inbox, NewRouter
from engine.io.router_links import RouterLinks
from engine.io.status import EngineStatus
from engine.io.thread import IOThread
from shared import wire
from shared.network.named_address import NameWatch
from tests.conftest import eventually, unused_port
from tests.engine.io.thread_process import HELLO, delta, submit

NAME = "dns+tcp://routers:5555"
PATIENCE_S = 30
Context = zmq.Context[zmq.Socket[bytes]]


class SomeRouter:
    """The router's end of a connection."""

    def __init__(self, context: Context, address: str) -> None:
        self.address = address
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(address)
        self._peer = b""

    def hear(self, kind: type[wire.Message]) -> wire.Message:
        """Return the next message of ``kind``."""
        while self._socket.poll(PATIENCE_S * 1000):
            self._peer, *frames = self._socket.recv_multipart()
            message, _ = wire.decode(frames, wire.ToRouter)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} at {self.address}")

    def greet(self) -> None:
        """Be joined by the engine."""
        self.hear(wire.Heartbeat)
        self.send(wire.Ping(router_id=self.address))
        assert self.hear(wire.Hello) == HELLO

    def send(self, message: wire.Message) -> None:
        self._socket.send_multipart([self._peer, *wire.encode(message)])

    def close(self) -> None:
        self._socket.close()


class Joining:
    """An engine's IO thread, and routers at the addresses that a name has."""

    def __init__(self) -> None:
        self.context: Context = zmq.Context()
        self.found: frozenset[str] = frozenset()
        self.inbox = Inbox()
        links = RouterLinks(self.context, {NAME: None}, self._watch)
        self.thread = IOThread(
            links=links,
            engine=HELLO.engine,
            incarnation=HELLO.incarnation,
            inbox=self.inbox,
            status=EngineStatus(),
            supervisor=None,
            stall_timeout_s=600,
            drain_timeout_s=60,
        )
        self.thread.start()
        self.thread.introduce(HELLO, {})

    def wait_for(self, *request_ids: str) -> None:
        """Wait until the main thread would have these requests."""
        missing, deadline = set(request_ids), time.monotonic() + PATIENCE_S
        while missing:
            assert time.monotonic() < deadline, missing
            for item in self.inbox.take(0.05):
                if isinstance(item, wire.Submit):
                    missing.discard(item.request_id)

    def _watch(self, address: str) -> NameWatch:
        def look_up(address: str) -> frozenset[str]:
            if not self.found:
                raise OSError("no such name")
            return self.found

        return NameWatch(address, look_up, interval_s=0.05)

    @contextmanager
    def router(self) -> Iterator[SomeRouter]:
        router = SomeRouter(self.context, f"tcp://127.0.0.1:{unused_port()}")
        try:
            yield router
        finally:
            router.close()

    def close(self) -> None:
        self.thread.stop(PATIENCE_S)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    monkeypatch.setattr(thread, "ROUTER_GONE_S", 0.5)
    joining = Joining()
    yield joining
    joining.close()


def test_an_engine_joins_routers_as_they_get_the_name(joining: Joining) -> None:
    with joining.router() as first, joining.router() as second:
        joining.found = frozenset({first.address})
        first.greet()
        joining.found |= {second.address}
        second.greet()
        joining.found = frozenset()  # a name server that is away takes no router away
        for router in (first, second):
            router.send(submit(router.address))
        joining.wait_for(first.address, second.address)
        joining.thread.send([wire.Tokens(deltas=[delta(first.address), delta(second.address)])])
        for router in (first, second):
            tokens = router.hear(wire.Tokens)
            assert isinstance(tokens, wire.Tokens)
            assert [each.request_id for each in tokens.deltas] == [router.address]


def test_a_router_that_lost_its_name_is_served_until_it_is_gone(
    joining: Joining, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with joining.router() as stays:
        with joining.router() as ends:
            joining.found = frozenset({stays.address, ends.address})
            stays.greet()
            ends.greet()
            ends.send(submit("last"))
            joining.wait_for("last")
            joining.found = frozenset({stays.address})
            joining.thread.send([wire.Tokens(deltas=[delta("last")])])
            ends.hear(wire.Tokens)
        gone = f"the router at {ends.address} is gone, and its address has left the name"
        eventually(lambda: gone in caplog.text)
        dropped = [each for each in joining.inbox.take(0) if isinstance(each, NewRouter)]
        assert ("last", 3) in {request for each in dropped for request in each.requests}
        joining.thread.send([wire.Bye(engine=HELLO.engine, incarnation=HELLO.incarnation)])
        stays.hear(wire.Bye)
    assert stays.address not in caplog.text.partition("has left the name")[2]
