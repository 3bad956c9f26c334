from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.io.store import block_fetch, block_puts
from engine.io.store.block_fetch import FileKind
from engine.plan import Cancellation
from shared import wire
from tests.engine.conftest import Wrap
from tests.engine.io.storing_engine import TIMEOUT_S, StoringEngine, running_kvstore
from tests.kvstore.blocks import hash_of, payload_of, wait_until
from tests.kvstore.process import Process


@pytest.fixture(scope="module")
def shared_kvstore() -> Iterator[Process]:
    with running_kvstore() as process:
        yield process


@pytest.fixture
def engine(shared_kvstore: Process) -> Iterator[StoringEngine]:
    """An engine that is new to a running kvstore."""
    shared_kvstore.revive()
    with closing(StoringEngine(shared_kvstore.endpoint)) as engine:
        engine.kvstore = shared_kvstore
        yield engine


def took(action: Callable[[], object]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


@pytest.fixture
def prefix(engine: StoringEngine) -> StoringEngine:
    """Return an engine whose kvstore has blocks 1 to 6, and the states after 2 and 4."""
    engine.store(1, 2, 3, 4, 5, 6)
    engine.store_state(2)
    engine.store_state(4)
    wait_until(lambda: engine.fetch_prefix(1, 2, 3, 4) == (4, 4))
    return engine


def test_a_prefix_ends_with_its_last_state(prefix: StoringEngine) -> None:
    assert prefix.fetch_prefix(1, 2, 3, 4, 5, 6) == (4, 4)
    assert prefix.fetch_prefix(1, 2, 3) == (2, 2)
    assert prefix.fetch_prefix(1) == (0, 0)
    assert prefix.fetch_prefix(1, 2, 9, 4) == (2, 2)  # block 9 is a gap before state 4
    assert prefix.fetch_prefix(1, 2, 3, 4, 5, 6, ready=3) == (1, 4)
    assert prefix.fetch_prefix(1, 2, 3, 4, ready=4) == (0, 4)


def test_a_part_of_the_page_after_the_last_one_is_fetched(engine: StoringEngine) -> None:
    engine.keep(3, 6, 8, 10, 11)
    assert engine.fetch_part(1, 2, 3, 4, 5, 6, 7, 8, 9, page_blocks=3) == (2, 2)
    assert engine.fetch_part(1, 2, 3, 10, 11, 7, page_blocks=3) == (1, 2), "the longest"
    assert engine.fetch_part(1, 2, 3, 10, 7, page_blocks=3) == (1, 1)
    assert engine.fetch_part(1, 2, 3, 7, 7, 7, page_blocks=3) == (1, 0)
    assert engine.fetch_part(10, 7, 7, page_blocks=3) == (0, 1)
    engine.kvstore.corrupt(8, engine.blocks.namespace)
    assert engine.fetch_part(1, 2, 3, 4, 5, 6, 7, 8, 9, page_blocks=3) == (2, 0)


def test_a_later_state_in_ram_is_not_fetched(prefix: StoringEngine) -> None:
    assert prefix.fetch_prefix(1, 2, 3, 4, 5, 6, in_ram=(5,)) == (5, 0)
    assert prefix.fetch_prefix(1, 2, 3, 4, 5, 6, in_ram=(3,)) == (4, 4)


def test_a_bad_state_makes_way_for_the_one_before_it(prefix: StoringEngine) -> None:
    path = prefix.kvstore.corrupt(4, prefix.states.namespace)
    assert prefix.fetch_prefix(1, 2, 3, 4, 5, 6) == (2, 2)
    assert prefix.client.stats.corrupt == 1
    wait_until(lambda: not path.exists())
    prefix.store_state(4)
    wait_until(lambda: prefix.fetch_prefix(1, 2, 3, 4) == (4, 4))


def test_a_file_of_another_layout_is_a_miss(engine: StoringEngine) -> None:
    engine.keep(1)
    sizes = tuple(len(buffer) for buffer in payload_of(1, 900))
    engine.client._blocks = FileKind(engine.blocks.namespace, sizes)
    assert engine.fetch(1) == []
    assert engine.client.stats.corrupt == 0
    engine.keep(2, size=900)


def test_a_payload_too_large_for_a_file_does_not_cost_the_connection(engine: StoringEngine) -> None:
    engine.keep(1)
    too_large = bytes(block_puts.MAX_PAYLOAD_BYTES + 1)
    drops = engine.client.stats.drops
    engine.client.store(hash_of(2), [too_large], is_state=True)
    assert engine.client.stats.drops == drops + 1
    assert engine.client.is_ready and engine.holds(1)


def test_a_kvstore_that_cannot_find_states_is_not_asked(prefix: StoringEngine) -> None:
    prefix.client._finds_last = False  # an older release
    started = time.monotonic()
    assert prefix.fetch_prefix(1, 2, 3, 4) == (0, 0)
    assert time.monotonic() - started < TIMEOUT_S


def test_blocks_come_back_up_to_the_first_gap(engine: StoringEngine) -> None:
    engine.store(1, 2, 4)
    wait_until(lambda: engine.holds(1, 2) and engine.holds(4))
    assert engine.fetch(1, 2, 3, 4) == [payload_of(1), payload_of(2)]
    assert engine.fetch(3, 1) == []
    assert engine.fetch() == []
    assert engine.fetch(4, 2, 1) == [payload_of(number) for number in (4, 2, 1)]
    wait_until(lambda: engine.client.stats.store is not None)
    stats = engine.client.stats
    assert stats.writes == 3 and stats.drops == 0 and stats.corrupt == 0
    assert stats.read_bytes > 0 and stats.written_bytes > 3000


def test_many_large_blocks_at_once(engine: StoringEngine) -> None:
    numbers = list(range(60))
    engine.keep(*numbers, size=300_000)
    random.Random(1).shuffle(numbers)
    assert engine.holds(*numbers, size=300_000)


def test_without_a_kvstore_every_fetch_is_a_miss_at_once(socket_dir: Path) -> None:
    with closing(StoringEngine(f"ipc://{socket_dir}/kvstore")) as engine:
        assert took(lambda: engine.fetch(1, 2)) < TIMEOUT_S / 2
        assert not engine.client.store(hash_of(1), payload_of(1))
        engine.client.touch([hash_of(1)])
        assert engine.client.stats.drops == 1
        assert engine.client.stats.store is None


def test_a_kvstore_killed_and_restarted_under_a_live_engine(engine: StoringEngine) -> None:
    engine.keep(1, 2)
    for _ in range(2):
        engine.kvstore.kill()
        wait_until(lambda: engine.client.stats.store is None)
        assert took(lambda: engine.fetch(1)) < TIMEOUT_S / 2
        assert not engine.client.store(hash_of(9), payload_of(9))
        engine.kvstore.start()
        wait_until(lambda: engine.holds(1, 2))
        engine.store(3)


def test_each_fetch_gets_one_answer_if_the_kvstore_is_killed_meanwhile(
    engine: StoringEngine,
) -> None:
    engine.keep(1, 2)
    engine.kvstore.pause()
    tickets = range(2_000_000, 2_000_050)
    for ticket in tickets:
        engine.client.fetch(ticket, [hash_of(1), hash_of(2)])
    engine.kvstore.kill()
    wait_until(lambda: all(ticket in engine.answers for ticket in tickets))


def test_a_kvstore_that_hangs_costs_one_timeout_and_is_used_again_when_it_wakes(
    engine: StoringEngine,
) -> None:
    engine.keep(1)
    engine.kvstore.pause()
    assert engine.fetch(1) == []
    assert took(lambda: [engine.fetch(1) for _ in range(5)]) < TIMEOUT_S
    assert not engine.client.store(hash_of(2), payload_of(2))
    engine.kvstore.resume()
    wait_until(lambda: engine.holds(1))


def test_an_idle_engine_notices_a_hang_without_a_request(engine: StoringEngine) -> None:
    engine.store(1)
    engine.kvstore.pause()
    wait_until(lambda: not engine.client.is_ready)
    assert took(lambda: engine.fetch(1)) < TIMEOUT_S / 2
    engine.kvstore.resume()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "swap"])
def test_a_bad_file_is_a_miss_and_is_removed(engine: StoringEngine, damage: str) -> None:
    engine.keep(1, 2, 3)
    path = engine.file_path(2)
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-10],
            "flip": data[:-1] + bytes([data[-1] ^ 1]),
            "empty": b"",
            "swap": engine.file_path(3).read_bytes(),
        }[damage]
    )
    assert engine.fetch(1, 2, 3) == [payload_of(1)]
    assert engine.client.stats.corrupt == 1
    wait_until(lambda: not path.exists())
    engine.store(2)
    wait_until(lambda: engine.holds(1, 2, 3))


def test_a_missing_file_or_a_fifo_in_its_place_is_a_miss(engine: StoringEngine) -> None:
    engine.keep(1, 2)
    engine.file_path(2).unlink()
    assert engine.fetch(1, 2) == [payload_of(1)]
    path = engine.file_path(1)
    path.unlink()
    os.mkfifo(path)
    assert engine.fetch(1) == []
    engine.store(1)  # replaces the fifo
    wait_until(lambda: engine.holds(1))


def test_an_engine_on_another_machine_gets_the_same_blocks(
    engine: StoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine the kvstore's paths do not exist."""

    def no_such_path(path: str, limit_bytes: int) -> bytes:
        raise FileNotFoundError(path)

    monkeypatch.setattr(block_fetch, "read_file", no_such_path)
    numbers = list(range(80))  # more than one reply holds
    engine.keep(*numbers, size=300_000)
    assert engine.fetch(0, 1, 99, 2) == [payload_of(number, 300_000) for number in (0, 1)]


def test_stores_beyond_the_bound_are_dropped_and_counted(
    engine: StoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_puts, "MAX_STORES", 4)
    monkeypatch.setattr(block_puts, "STORE_TIMEOUT_S", 2.0)
    engine.store(1)
    engine.kvstore.pause()
    taken = [engine.client.store(hash_of(n), payload_of(n)) for n in range(2, 12)]
    assert sum(taken) == 4 and engine.client.stats.drops == 6
    wait_until(lambda: engine.client.stats.drops == 10)  # the others after the time-out
    engine.kvstore.resume()
    engine.store(50)


def test_what_is_not_sent_when_the_cache_is_cleared_is_not_stored(
    engine: StoringEngine, wrap: Wrap
) -> None:
    cleared = threading.Event()

    @wrap(block_puts, "encode")
    def late(encode: Callable[..., bytes], *given: Any) -> bytes:
        assert cleared.wait(60)
        return encode(*given)

    wait_until(lambda: engine.client.is_ready)
    assert engine.client.store(hash_of(2), payload_of(2))
    engine.client.clear()
    cleared.set()
    wait_until(lambda: (hash_of(2), False) in engine.not_stored)
    assert not engine.holds(2)
    wait_until(lambda: engine.client.room().files > 0)
    engine.keep(2)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_cache_that_is_cleared_while_the_kvstore_is_away_is_empty_when_it_is_back(
    engine: StoringEngine, hangs: bool
) -> None:
    engine.keep(1)
    path = engine.file_path(1)
    if hangs:
        engine.kvstore.pause()
    else:
        engine.kvstore.kill()
        wait_until(lambda: engine.client.stats.store is None)
    engine.client.clear()
    if hangs:
        engine.kvstore.kill()
    engine.kvstore.start()
    wait_until(lambda: not path.exists())
    engine.keep(1)


def test_what_the_kvstore_does_not_take_is_told_and_arrives_when_it_does(
    engine: StoringEngine,
) -> None:
    engine.store(1)
    engine.kvstore.pause()
    assert engine.client.store(hash_of(2), payload_of(2))
    assert engine.client.store(hash_of(3), payload_of(1003), is_state=True)
    engine.kvstore.kill()
    wait_until(lambda: {(hash_of(2), False), (hash_of(3), True)} <= {*engine.not_stored})
    assert engine.client.room() == (0, 0)
    engine.kvstore.start()
    wait_until(lambda: engine.client.room().files > 0)
    engine.store(2)
    engine.store_state(3)


def test_a_kvstore_that_refuses_everything_is_offered_one_block_at_a_time() -> None:
    with (
        running_kvstore("--ssd-max-size-gb", "0.00001") as kvstore,
        closing(StoringEngine(kvstore.endpoint)) as engine,
    ):
        wait_until(lambda: engine.client.is_ready)
        for number in range(20):
            assert engine.client.store(hash_of(number), payload_of(number, 100_000))
        wait_until(lambda: len(engine.not_stored) == 20)  # all acknowledged before they were lost
        wait_until(lambda: engine.client.room().files == 1)
        assert engine.client.store(hash_of(30), payload_of(30))
        wait_until(lambda: engine.client.room().files == 2)


def test_a_payload_that_cannot_be_sent_is_dropped_alone(engine: StoringEngine) -> None:
    engine.store(1)
    strided = memoryview(bytes(100))[::2]
    assert engine.client.store(hash_of(2), [strided])
    wait_until(lambda: engine.client.stats.drops == 1)
    engine.store(3)


def test_a_short_fetch_does_not_wait_for_a_long_one_nor_does_any_become_a_miss(
    engine: StoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.keep(*range(60))
    read = block_fetch.read_block

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(block_fetch, "read_block", slow)
    wanted = {9001: range(60), 9002: range(60), 9003: range(2)}
    cancelled = Cancellation()
    cancelled.is_set = True
    engine.client.fetch(9000, [hash_of(number) for number in range(60)], None, cancelled)
    for ticket, numbers in wanted.items():
        engine.client.fetch(ticket, [hash_of(number) for number in numbers])
    wait_until(lambda: 9003 in engine.answers and 9000 in engine.answers)
    assert 9001 not in engine.answers
    assert engine.answers[9000] == [[]], "nothing of it was read"
    wait_until(lambda: 9001 in engine.answers and 9002 in engine.answers)
    for ticket, numbers in wanted.items():
        assert engine.answers[ticket] == [[payload_of(number) for number in numbers]]


def test_a_touched_chain_outlives_others() -> None:
    flags = "--ssd-max-size-gb", "0.000004", "--ssd-durability", "persistent"
    with running_kvstore(*flags) as kvstore, closing(StoringEngine(kvstore.endpoint)) as engine:
        engine.store(1, 2, 3)  # about 1.3 kB each: three fit

        def is_touched() -> bool:  # look-ups are done in order, those of a busy kvstore not at all
            engine.client.touch([hash_of(1), hash_of(2)])
            return engine.holds(1)

        wait_until(is_touched)
        engine.store(4)
        # An answer that takes more than a second, on a busy machine, is a miss.
        assert any(engine.holds(1, 2) for _ in range(5)) and any(engine.holds(4) for _ in range(5))
        assert engine.fetch(3) == []


def test_a_peer_that_sends_rubbish_is_a_miss(socket_dir: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.ROUTER)
    peer.set(zmq.RCVTIMEO, 200)
    peer.bind(f"ipc://{socket_dir}/kvstore")
    engine = StoringEngine(f"ipc://{socket_dir}/kvstore")
    ticket = 3_000_000

    def talk() -> None:
        while ticket not in engine.answers:
            try:
                name, *frames = peer.recv_multipart()
            except zmq.Again:
                continue
            peer.send_multipart([name, b"rubbish", b"more"])
            message, _ = wire.decode(frames, wire.ToStore)
            match message:
                case wire.Locate():
                    peer.send_multipart([name, *wire.encode(wire.Nonce(path="/dev/null"))])
                case wire.Get(ticket=number):
                    reply = wire.GetReply(ticket=number, count=5)
                    peer.send_multipart(
                        [name, *wire.encode(reply, *[os.urandom(2000) for _ in range(5)])]
                    )

    talker = threading.Thread(target=talk)
    talker.start()
    wait_until(lambda: engine.client.store(hash_of(1), payload_of(1)))
    engine.client.fetch(ticket, [hash_of(1), hash_of(2)])
    wait_until(lambda: ticket in engine.answers)
    talker.join()
    assert engine.answers[ticket] == [[]]
    engine.close()
    peer.close(linger=0)
    context.destroy(linger=0)
