"""Plans on their way from rank 0 to the other ranks.

One ZeroMQ socket of rank 0, to which each rank connects: ``ipc`` in a private directory. Frames are
a number and a content. Number 0 begins the start; plans count from 1.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from engine.parallel.errors import RankFailed
from engine.plan import Decode, Plan
from shared.wire import SamplingParams

PAYLOADS = ("inserts", "exports")
"""What plans of a group have not: blocks of KV leave no rank."""
OF_SAMPLING = ("sampling", "forbidden", "logprobs", "history", "grammar")
"""What only choosing tokens needs."""


def _fields_of(kind: Any, without: tuple[str, ...]) -> list[tuple[str, Any]]:
    fields = msgspec.structs.fields(kind)
    return [(field.name, field.type) for field in fields if field.name not in without]


_DECODE, _PLAN = _fields_of(Decode, OF_SAMPLING), _fields_of(Plan, (*PAYLOADS, "decodes"))
_SentDecode = msgspec.defstruct("_SentDecode", _DECODE, array_like=True, frozen=True)
_many: Any = tuple  # mypy takes no type that is made at run time
_SentPlan = msgspec.defstruct(
    "_SentPlan", [*_PLAN, ("decodes", _many[_SentDecode, ...])], array_like=True, frozen=True
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_SentPlan)
_ANY_SAMPLING = SamplingParams(seed=0)


def pack(plan: Plan) -> bytes:
    """Return ``plan`` as the other ranks get it. Raises: ValueError if it moves blocks between
    memory and the kvstore."""
    if plan.inserts or plan.exports:
        raise ValueError("blocks of a group cannot leave its ranks")
    decodes = tuple(_SentDecode(*[getattr(d, name) for name, _ in _DECODE]) for d in plan.decodes)
    return _encoder.encode(_SentPlan(*[getattr(plan, name) for name, _ in _PLAN], decodes))


def unpack(packed: bytes) -> Plan:
    """Return the plan in ``packed``. Raises: msgspec.MsgspecError."""
    sent = _decoder.decode(packed)
    decodes = tuple(
        Decode(sampling=_ANY_SAMPLING, **{name: getattr(each, name) for name, _ in _DECODE})
        for each in sent.decodes
    )
    return Plan(decodes=decodes, **{name: getattr(sent, name) for name, _ in _PLAN})


class PlanSender:
    """Rank 0's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, size: int) -> None:
        """``size`` is the number of ranks."""
        self._ranks = [_name(rank) for rank in range(1, size)]
        self._number = 0
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)

    def wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until every rank has connected. Raises: `RankFailed`."""
        missing = set(self._ranks)
        while missing:
            if not self._socket.poll(int(timeout_s * 1000)):
                names = ", ".join(sorted(name.decode() for name in missing))
                raise RankFailed(f"no sign of {names} in {timeout_s:.0f} s")
            name, _ = self._socket.recv_multipart()
            missing.discard(name)

    def start(self, content: bytes) -> None:
        """Send what the start of the ranks needs next."""
        self._send(0, content)

    def send(self, packed_plan: bytes) -> None:
        """Send the next plan. Raises: `RankFailed` if a rank is gone, or takes nothing more."""
        self._number += 1
        self._send(self._number, packed_plan)

    def _send(self, number: int, content: bytes) -> None:
        for name in self._ranks:
            try:
                self._socket.send_multipart([name, b"%d" % number, content], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RankFailed(f"{name.decode()} takes no plan: {error}") from error


class PlanReceiver:
    """The end of a rank other than 0."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int) -> None:
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTING_ID, _name(rank))
        self._socket.connect(address)
        self._socket.send(b"here")

    def wait_for_start(self) -> bytes:
        """Return what `PlanSender.start` sends. It waits without end: the process ends with rank 0
        (`engine.parallel.health`)."""
        number, content = self._socket.recv_multipart()
        if number != b"0":
            raise RankFailed("a plan came before the start")
        return content

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next plan, packed; None if there is none within ``timeout_s``.

        Without a time it waits until there is one. Raises: `RankFailed` if one is missing."""
        if timeout_s is not None and not self._socket.poll(int(timeout_s * 1000)):
            return None
        number, content = self._socket.recv_multipart()
        self._number += 1
        if int(number) != self._number:
            raise RankFailed(f"plan {self._number} is missing: {int(number)} came")
        return content


def _name(rank: int) -> bytes:
    return b"rank %d" % rank
