"""Malformed messages, messages with nonsensical values, and a peer that sends them."""

from __future__ import annotations

import math
import random
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
import msgspec
import zmq

from shared import wire
from shared.hashing import HASH_BYTES
from tests.router.scripted_engine import make_heartbeat, make_hello
from tests.shared.submits import submit

PATIENCE_S = 90.0
Kind = TypeVar("Kind", bound=wire.Message)
NAN = float("nan")


def hello(**fields: Any) -> wire.Hello:
    return msgspec.structs.replace(make_hello("fake", incarnation="i", model="fake"), **fields)


def heartbeat(**fields: Any) -> wire.Heartbeat:
    return msgspec.structs.replace(make_heartbeat("fake", "i", 1), **fields)


ADAPTER = wire.AdapterRef(name="\x00", path="/\x00", digest="no digest", rank=-1)
DECISIONS = wire.AdapterDecisions(
    decisions=[
        wire.AdapterDecision(name="a" * 1000, adapter=ADAPTER, version=-(2**63)),
        wire.AdapterDecision(name="\x00", version=2**63),
    ]
)
DELTA = wire.Delta(request_id="unknown", attempt=-1, index=-5, token_ids=[-1, 2**40])
TO_ROUTER: list[wire.Message] = [
    hello(protocol=-1),
    hello(protocol=2**63),
    hello(block_size=0),
    hello(block_size=-16),
    hello(context_length=-1),
    hello(vocab_size=0),
    hello(max_sequences=-1),
    hello(model=""),
    heartbeat(),
    heartbeat(number=-1, phase_s=NAN, stalled_s=-math.inf, phase="loading"),
    heartbeat(engine="engine-0", stats=wire.EngineStats(limit_bytes=-1, unevictable_bytes=2**63)),
    heartbeat(live=[wire.LiveRequest(request_id="unknown", attempt=2**63, generated=-1)] * 1000),
    heartbeat(
        live=[
            wire.LiveRequest(
                request_id="unknown", attempt=0, generated=0, computed_prompt_tokens=-(2**63)
            )
        ]
    ),
    wire.Accepted(request_id="unknown", attempt=0),
    wire.Refused(request_id="unknown", attempt=0, reason="full", message=""),
    wire.Tokens(deltas=[DELTA] * 1000),
    wire.Encoded(request_id="unknown", attempt=-1, rows=b"x", queue_s=NAN, compute_s=-1.0),
    wire.AdapterChecked(name="unknown", path="", adapter=ADAPTER, error="unasked"),
    DECISIONS,
    wire.CacheEvents(number=-1, added=[b""] * 1000, removed=[b"x"]),
    wire.Files(names=["../../tmp/x", "tokenizer.json"]),
    wire.Bye(engine="engine-0", incarnation="i"),
]

HASH, NAMESPACE = bytes(HASH_BYTES), "00" * HASH_BYTES
TO_STORE: list[wire.Message] = [
    wire.Locate(),
    wire.Located(nonce="wrong"),
    wire.Has(ticket=1, namespace=NAMESPACE, hashes=[HASH]),
    wire.Get(ticket=1, namespace=NAMESPACE, hashes=[HASH]),
    wire.Put(ticket=1, namespace=NAMESPACE, hash=HASH),
    wire.Touch(namespace=NAMESPACE, hashes=[HASH]),
    wire.Corrupt(namespace=NAMESPACE, hash=HASH),
    wire.Clear(namespace=NAMESPACE),
    wire.StoreStatsWanted(),
]

TO_ENGINE: list[wire.Message] = [
    wire.Ping(router_id="r"),
    submit("r", [5], max_tokens=1),
    submit("n", [5], max_tokens=1, logprobs=0, logprob_token_ids=(5,) * 1000),
    submit("a", [5], max_tokens=1, adapter=ADAPTER),
    wire.CheckAdapter(name="\x00", path="/\x00" * 1000),
    DECISIONS,
    wire.Encode(request_id="e", attempt=0, token_ids=[[5], []], second_starts=[-1, 7]),
    wire.Abort(request_id="r"),
    wire.ClearCache(),
    wire.FilesWanted(names=["config.json"]),
]


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
