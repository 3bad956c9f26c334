"""Malformed and nonsensical messages, and a peer that sends them."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import msgspec
import zmq

from shared import wire

PATIENCE_S = 30.0
Kind = TypeVar("Kind", bound=wire.Message)


def malformed(valid: Sequence[wire.Message], seed: int = 0) -> list[list[bytes]]:
    """Return multipart messages that do not decode, some of them close to the ``valid`` ones."""
    chance = random.Random(seed)
    made: list[list[bytes]] = [[chance.randbytes(2 ** chance.randrange(14))] for _ in range(20)]
    made += [[chance.randbytes(9) for _ in range(chance.randrange(2, 9))] for _ in range(5)]
    made += [[b""] * 3, [b""] * (wire.MAX_FRAMES + 1), [bytes(wire.MAX_HEADER_BYTES + 1)]]
    made += [
        [b"\x91" * 100_000 + b"\x00"],
        [b"\x81\xa1a" * 100_000 + b"\x00"],
        [b"\xdf" + b"\xff" * 4],
    ]
    odd: list[Any] = [None, 5, "text", [], {}, {"type": "no such"}, {"type": 5}, {5: "type"}]
    odd += [
        {"type": ["hello"]},
        {"type": "\x00" * 1000},
        [{"type": valid[0].__struct_config__.tag}],
    ]
    made += [[msgpack.packb(value)] for value in odd]
    made += [[msgpack.packb({"type": "beat"})[:-4] + b"\xff" * 4]]
    for message in valid:
        header = bytes(wire.encode(message)[0])
        made += [[header[: len(header) // 2]], [header[:-1]], [header + b"\x00"]]
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        for name in fields:
            made.append([msgpack.packb(fields | {name: msgpack.ExtType(7, b"x")})])
            made.append([msgpack.packb(fields | {name: [[[fields]]]})])
    return made


def send_foreign_bytes(endpoint: str, seed: int = 0) -> None:
    """Send bytes that are not ZeroMQ's protocol, each on a new connection."""
    chance = random.Random(seed)
    handshake = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    for data in (b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(5000), handshake + b"\xff" * 99, b""):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(endpoint.removeprefix("ipc://"))
            try:
                client.sendall(data)
            except BrokenPipeError:
                pass  # the process has closed the connection already


class Peer:
    """One end of a connection: a DEALER that connects, or a ROUTER that binds (``bind``)."""

    def __init__(self, endpoint: str, *, bind: bool = False) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if bind else zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # with a limit, a ROUTER drops what exceeds it
        self._socket.setsockopt(zmq.SNDTIMEO, int(1000 * PATIENCE_S))
        (self._socket.bind if bind else self._socket.connect)(endpoint)
        self._bound = bind
        self._identity: list[bytes] = []

    def send(self, message: wire.Message, *payload: bytes) -> None:
        self.send_raw([bytes(frame) for frame in wire.encode(message, *payload)])

    def send_raw(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart([*self._identity, *frames])

    def receive(self, kind: type[Kind], expected: Any) -> Kind:
        """Return the next message of ``kind``; skip other messages of the types ``expected``."""
        deadline = time.monotonic() + PATIENCE_S
        while self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            frames = self._socket.recv_multipart()
            if self._bound:
                self._identity = [frames.pop(0)]
            message, _ = wire.decode(frames, expected)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind} arrived")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
