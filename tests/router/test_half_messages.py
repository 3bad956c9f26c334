"""Engines that are killed while they send: half a message must not become one."""

from __future__ import annotations

import socket

import pytest

from shared import wire
from tests.router.conftest import Server, ok

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of ZMTP 3.0 (https://rfc.zeromq.org/spec/23/), as of all below."""
MORE, LONG = 1, 2
TIMES = 20


def ready() -> bytes:
    kind = b"DEALER"
    body = b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return bytes([4, len(body)]) + body


def frame(data: bytes, more: int = 0) -> bytes:
    return bytes([LONG | more]) + len(data).to_bytes(8, "big") + data


BYE = bytes(wire.encode(wire.Bye(engine="engine-0", incarnation="another"))[0])


@pytest.mark.parametrize(
    "sent",
    [
        frame(BYE, MORE),
        frame(BYE, MORE) + frame(bytes(100_000), MORE)[:5000],
        frame(BYE, MORE) + frame(bytes(300), MORE),
        frame(BYE)[:-1],
        frame(BYE)[:4],
        frame(bytes(2**20))[:50_000],
    ],
    ids=("first-frame", "half-of-second", "two-of-three", "without-end", "header", "large"),
)
def test_half_a_message_of_an_engine_that_dies_is_dropped(served: Server, sent: bytes) -> None:
    dropped = served.metric("dropped_messages_total ")
    for _ in range(TIMES):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(served.address.removeprefix("ipc://"))
            peer.sendall(GREETING)
            received = 0
            while received < len(GREETING):
                received += len(peer.recv(4096))
            peer.sendall(ready() + sent)
    assert ok(served.complete("x")).json()["choices"][0]["text"] == "hello world"
    assert served.metric("dropped_messages_total ") == dropped
    assert "handling a" not in served.log.read_text()
