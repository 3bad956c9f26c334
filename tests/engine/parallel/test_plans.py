"""Plans between ranks: what they contain, and what their sockets notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from engine.parallel.errors import RankFailed
from engine.parallel.plans import PlanReceiver, PlanSender, StoredName, pack, unpack
from engine.parallel.progress import StepProgress
from engine.plan import (
    BlockName,
    Chunk,
    CopyPage,
    Decode,
    Export,
    Insert,
    Payload,
    Plan,
    Table,
)
from shared.wire import Grammar, SamplingParams

SLOT = 3


@pytest.fixture
def address(socket_dir: Path) -> str:
    return f"ipc://{socket_dir}/plans"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    found: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield found
    found.destroy(0)


def test_a_plan_arrives_without_what_only_choosing_tokens_needs() -> None:
    decode = Decode(
        SLOT,
        position=7,
        token_id=5,
        output_index=2,
        sampling=SamplingParams(seed=4, temperature=1.0),
        forbidden=(1,),
        logprobs=3,
        history=(1, 2, 3),
        constrained=True,
        grammar=Grammar(kind="regex", source="a+"),
    )
    plan = Plan(
        step=9,
        freed_slots=(1, 2),
        moved_pages=(CopyPage(9, 1, 64),),
        num_pages=8,
        tables=(Table(SLOT, 1, (4, 5)),),
        copies=(CopyPage(4, 5, 16),),
        decodes=(decode,),
        chunks=(Chunk(SLOT, 8, (6, 7), (7,), 2),),
        exports=(Export(11, 4),),
    )
    received = unpack(pack(plan)).plan
    (arrived,) = received.decodes
    assert (arrived.slot, arrived.position, arrived.token_id) == (SLOT, 7, 5)
    assert arrived.constrained and arrived.output_index == 2
    assert (arrived.history, arrived.grammar, arrived.logprobs) == (None, None, None)
    assert (received.step, received.chunks, received.exports) == (9, plan.chunks, plan.exports)
    assert (received.moved_pages, received.num_pages) == (plan.moved_pages, 8)
    assert (received.tables, received.copies) == (plan.tables, plan.copies)
    assert received.freed_slots == (1, 2)


class FetchedBlocks:
    """A `RankBlocks` that has fetched ``contents``."""

    def __init__(self, contents: dict[StoredName, Payload]) -> None:
        self._contents = contents

    def fetched(self, name: StoredName) -> Payload:
        return self._contents[name]

    def release(self, names: Sequence[StoredName]) -> None:
        raise AssertionError

    def store(self, name: StoredName, payload: Payload) -> None:
        raise AssertionError


def test_pages_travel_by_name() -> None:
    """Each rank inserts its own part of a page."""
    secret = b"keys and values of rank 0"
    plan = Plan(
        step=1,
        inserts=(Insert(5, (secret,), 2), Insert(6, (secret,))),
        names=(BlockName(5, b"five"), BlockName(6, b"five", is_snapshot=True), BlockName(7, b"x")),
        exports=(Export(7, 3),),
    )
    released = [StoredName(b"old", is_state=False)]
    packed = pack(plan, released)
    assert secret not in packed
    received = unpack(packed)
    assert received.released == tuple(released)
    own: dict[StoredName, Payload] = {
        StoredName(b"five", is_state=False): (b"a block",),
        StoredName(b"five", is_state=True): (b"a state",),
    }
    completed = received.with_payloads(FetchedBlocks(own))
    assert [insert.payload for insert in completed.inserts] == [(b"a block",), (b"a state",)]
    assert completed.exports == (Export(7, 3),) and completed.names == plan.names
    with pytest.raises(RankFailed):
        received.with_payloads(None)


def test_plans_arrive_in_order_after_the_start(
    address: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    sender = PlanSender(context, address, size=3)
    receivers = [PlanReceiver(context, address, rank, rank << 30) for rank in (1, 2)]
    assert sender.wait_for_ranks(30.0) == 1 << 30
    sender.start(b"begin")
    sender.send(b"one")
    sender.send(b"two")
    for receiver in receivers:
        assert receiver.wait_for_start() == b"begin"
        assert [receiver.receive(30.0), receiver.receive(30.0)] == [b"one", b"two"]
        assert receiver.receive(0.0) is None


def test_a_missing_rank_is_named(address: str, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    sender = PlanSender(context, address, size=3)
    _ = PlanReceiver(context, address, 1, 1 << 30)
    with pytest.raises(RankFailed, match=r"rank 2.* did not connect"):
        sender.wait_for_ranks(2.0)


def test_a_rank_that_missed_a_plan_does_not_go_on(
    address: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    receiver = PlanReceiver(context, address, 1, 1 << 30)
    name, _ = socket.recv_multipart()
    socket.send_multipart([name, b"2", b"the second"])
    with pytest.raises(RankFailed, match="plan 1 is missing"):
        receiver.receive()


def test_a_rank_that_never_came_takes_no_plan(
    address: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with pytest.raises(RankFailed, match="rank 1 accepts no plan"):
        PlanSender(context, address, size=2).send(b"plan")


def test_digests_are_of_plans_and_tokens() -> None:
    def after(*steps: tuple[bytes, list[int]]) -> StepProgress:
        progress = StepProgress()
        for plan, tokens in steps:
            progress.begin(plan)
            progress.finish(tokens)
        return progress

    own = after((b"a", [1]), (b"b", [2, 3]))
    assert not own.differs(after((b"a", [1]), (b"b", [2, 3])).steps)
    assert not own.differs(after((b"a", [1])).steps), "a rank may be behind"
    assert own.differs(after((b"a", [2])).steps)
    assert own.differs(after((b"c", [1])).steps)
    assert not own.differs(StepProgress().steps)
