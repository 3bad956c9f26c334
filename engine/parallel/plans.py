"""Transfer of plans from rank 0 to the other ranks.

Rank 0 has one ZeroMQ socket, to which each rank connects: ``ipc`` in a private directory. Frames
are a number and a content. Number 0 starts the start-up; plans count from 1.

Blocks from the kvstore are named in plans. Each rank has already fetched its own part of them
(`engine.io.store.group_store`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import zmq

from engine.parallel.errors import RankFailed
from engine.plan import BlockName, Decode, Insert, Payload, Plan
from shared.network.curve import EngineKeys, KeyPair
from shared.wire import SamplingParams

OF_SAMPLING = ("sampling", "forbidden", "logprobs", "logprob_token_ids", "history", "grammar")
"""Data needed only for sampling."""


class StoredName(NamedTuple):
    """The kvstore's name of a page or a recurrent state."""

    hash: bytes
    is_state: bool


class RankBlocks(Protocol):
    """This rank's parts of pages and states: fetched ones, and ones to be stored. All methods are
    thread-safe."""

    def fetched(self, name: StoredName) -> Payload:
        """Return what was fetched for rank 0. Raises: `RankFailed` if it was not."""

    def release(self, names: Sequence[StoredName]) -> None:
        """Drop fetched files, each as often as it is named, because rank 0 has done so."""

    def store(self, name: StoredName, payload: Payload) -> None:
        """Send to the kvstore."""


class ReceivedPlan(NamedTuple):
    plan: Plan
    """The plan, with inserts that have no payload."""
    released: Sequence[StoredName]
    """Names of fetched payloads that no later plan inserts."""

    def with_payloads(self, blocks: RankBlocks | None) -> Plan:
        """Return the plan with this rank's payloads. Raises: `RankFailed`."""
        plan = self.plan
        if not plan.inserts:
            return plan
        if blocks is None:
            raise RankFailed("a plan inserts blocks, but there is no kvstore")
        names = {name.block_id: stored_name(name) for name in plan.names}
        inserts = tuple(
            Insert(insert.block_id, blocks.fetched(names[insert.block_id]), insert.page)
            for insert in plan.inserts
        )
        return msgspec.structs.replace(plan, inserts=inserts)


def stored_name(name: BlockName) -> StoredName:
    return StoredName(name.hash, name.is_snapshot)


def _fields_of(kind: Any, without: tuple[str, ...]) -> list[tuple[str, Any]]:
    fields = msgspec.structs.fields(kind)
    return [(field.name, field.type) for field in fields if field.name not in without]


_DECODE, _INSERT = _fields_of(Decode, OF_SAMPLING), _fields_of(Insert, ("payload",))
_PLAN = _fields_of(Plan, ("decodes", "inserts"))
_SentDecode = msgspec.defstruct("_SentDecode", _DECODE, array_like=True, frozen=True)
_SentInsert = msgspec.defstruct("_SentInsert", _INSERT, array_like=True, frozen=True)
_many: Any = tuple  # mypy accepts no type created at run time
_SentPlan = msgspec.defstruct(
    "_SentPlan",
    [
        *_PLAN,
        ("decodes", _many[_SentDecode, ...]),
        ("inserts", _many[_SentInsert, ...]),
        ("released", _many[StoredName, ...]),
    ],
    array_like=True,
    frozen=True,
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_SentPlan)
_ANY_SAMPLING = SamplingParams(seed=0)


def pack(plan: Plan, released: Sequence[StoredName] = ()) -> bytes:
    """Return ``plan`` in the form for the other ranks, without any KV. ``released`` as in
    `ReceivedPlan`."""
    inserts = tuple(_SentInsert(each.block_id, each.page) for each in plan.inserts)
    decodes = tuple(_SentDecode(*[getattr(d, name) for name, _ in _DECODE]) for d in plan.decodes)
    fields = [getattr(plan, name) for name, _ in _PLAN]
    return _encoder.encode(_SentPlan(*fields, decodes, inserts, tuple(released)))


def unpack(packed: bytes) -> ReceivedPlan:
    """Return the plan in ``packed``. Raises: msgspec.MsgspecError."""
    sent = _decoder.decode(packed)
    decodes = tuple(
        Decode(sampling=_ANY_SAMPLING, **{name: getattr(each, name) for name, _ in _DECODE})
        for each in sent.decodes
    )
    inserts = tuple(Insert(each.block_id, (), each.page) for each in sent.inserts)
    others = {name: getattr(sent, name) for name, _ in _PLAN}
    plan = Plan(decodes=decodes, inserts=inserts, **others)
    return ReceivedPlan(plan, sent.released)


class PlanSender:
    """Rank 0's side."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        size: int,
        keys: KeyPair | None = None,
    ) -> None:
        """``size`` is the number of ranks. ``keys`` are for tcp."""
        self._ranks = [rank_name(rank) for rank in range(1, size)]
        self._number = 0
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            keys.guard(self._socket)
        self._socket.bind(address)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)

    def wait_for_ranks(self, timeout_s: float) -> int:
        """Wait until every rank has connected, and return the smallest of their memories in bytes.
        Raises: `RankFailed`."""
        missing, smallest_bytes = set(self._ranks), sys.maxsize
        while missing:
            if not self._socket.poll(int(timeout_s * 1000)):
                names = ", ".join(sorted(name.decode() for name in missing))
                raise RankFailed(f"{names} did not connect within {timeout_s:.0f} s")
            name, memory_bytes = self._socket.recv_multipart()
            missing.discard(name)
            smallest_bytes = min(smallest_bytes, int(memory_bytes))
        return smallest_bytes

    def start(self, content: bytes) -> None:
        """Send the next item for the start-up of the ranks."""
        self._send(0, content)

    def send(self, packed_plan: bytes) -> None:
        """Send the next plan. Raises: `RankFailed` if a rank is gone or accepts nothing more."""
        self._number += 1
        self._send(self._number, packed_plan)

    def _send(self, number: int, content: bytes) -> None:
        for name in self._ranks:
            try:
                self._socket.send_multipart([name, b"%d" % number, content], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RankFailed(f"{name.decode()} accepts no plan: {error}") from error


class PlanReceiver:
    """The side of a rank other than 0."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        rank: int,
        memory_bytes: int,
        keys: EngineKeys | None = None,
    ) -> None:
        """``memory_bytes`` is the memory that this rank may use."""
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTING_ID, rank_name(rank))
        if keys is not None:
            keys.protect(self._socket)
        self._socket.connect(address)
        self._socket.send(b"%d" % memory_bytes)

    def wait_for_start(self) -> bytes:
        """Return what `PlanSender.start` sends. Waits without a timeout: the process exits with
        rank 0 (`engine.parallel.health`)."""
        number, content = self._socket.recv_multipart()
        if number != b"0":
            raise RankFailed("a plan arrived before the start-up was complete")
        return content

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next plan, packed; None if there is none within ``timeout_s``.

        Without a timeout it waits until there is one. Raises: `RankFailed` if one is missing."""
        if timeout_s is not None and not self._socket.poll(int(timeout_s * 1000)):
            return None
        number, content = self._socket.recv_multipart()
        self._number += 1
        if int(number) != self._number:
            raise RankFailed(f"plan {self._number} is missing: received {int(number)}")
        return content


def rank_name(rank: int) -> bytes:
    """Return the ZeroMQ identity of a rank."""
    return b"rank %d" % rank
