from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvstore import lookups
from kvstore import server as server_module
from kvstore.directory import BlockDirectory, BlockKey, FileInfo
from kvstore.disk import Disk
from kvstore.server import Server
from kvstore.store import DiskStore
from kvstore.writer import Writer
from shared import wire
from shared.blockfile import encode
from shared.hashing import HASH_BYTES
from tests.kvstore.blocks import NAMESPACE, file_of, hash_of, payload_of, wait_until
from tests.kvstore.faulty_disk import FaultyDisk


@dataclass
class Running:
    """A server on a thread of its own, and engines' ends of its socket."""

    server: Server
    store: DiskStore
    writer: Writer
    directory: BlockDirectory
    endpoint: str
    context: zmq.Context[zmq.Socket[bytes]]
    engines: list[Engine] = field(default_factory=list)

    def engine(self) -> Engine:
        engine = Engine(self.context, self.endpoint)
        self.engines.append(engine)
        return engine

    def local_engine(self) -> Engine:
        engine = self.engine()
        nonce = Path(engine.ask(wire.Locate())[0].path).read_text()
        engine.send(wire.Located(nonce=nonce))
        return engine


class Engine:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVTIMEO, 20_000)
        self.socket.set(zmq.RCVHWM, 1)
        self.socket.set(zmq.RCVBUF, 4096)
        self.socket.connect(endpoint)

    def send(self, message: wire.Message, *payload: bytes) -> None:
        self.socket.send_multipart(wire.encode(message, *payload))

    def receive(self) -> tuple[Any, list[bytes]]:
        return wire.decode(self.socket.recv_multipart(), wire.FromStore)

    def ask(self, message: wire.Message, *payload: bytes) -> tuple[Any, list[bytes]]:
        """Return the answer to ``message``, past reports of blocks that were lost later."""
        self.send(message, *payload)
        while True:
            reply, frames = self.receive()
            if not isinstance(reply, wire.PutReply) or reply.ticket == getattr(
                message, "ticket", 0
            ):
                return reply, frames

    def put(self, number: int, size: int = 1000) -> wire.PutReply:
        message = wire.Put(ticket=number, namespace=NAMESPACE, hash=hash_of(number))
        reply, _ = self.ask(message, file_of(number, size))
        assert isinstance(reply, wire.PutReply) and reply.ticket == number
        return reply

    def get(self, *numbers: int) -> tuple[wire.GetReply, list[bytes]]:
        hashes = [hash_of(number) for number in numbers]
        reply, frames = self.ask(wire.Get(ticket=77, namespace=NAMESPACE, hashes=hashes))
        assert isinstance(reply, wire.GetReply) and reply.ticket == 77
        return reply, frames

    def has(self, *numbers: int) -> int:
        hashes = [hash_of(number) for number in numbers]
        reply, _ = self.ask(wire.Has(ticket=1, namespace=NAMESPACE, hashes=hashes))
        count: int = reply.count
        return count

    def stats(self) -> wire.StoreStats:
        reply, _ = self.ask(wire.StoreStatsWanted())
        assert isinstance(reply, wire.StoreStatsReply)
        return reply.stats


@pytest.fixture
def running(tmp_path: Path, socket_dir: Path) -> Iterator[Running]:
    yield from run(tmp_path, socket_dir)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def persistent(tmp_path: Path, socket_dir: Path, disk: FaultyDisk) -> Iterator[Running]:
    yield from run(tmp_path, socket_dir, persistent=True, disk=disk)


def run(
    tmp_path: Path, socket_dir: Path, *, persistent: bool = False, disk: Disk | None = None
) -> Iterator[Running]:
    endpoint = f"ipc://{socket_dir}/kvstore"
    directory = BlockDirectory(tmp_path / "blocks", disk)
    store = DiskStore(directory)
    store.load()
    writer = Writer(store, persistent=persistent)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(
        context,
        [endpoint],
        directory,
        store,
        writer,
        acknowledges_early=not persistent,
        max_reply_bytes=25_000,
    )
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    running = Running(server, store, writer, directory, endpoint, context)
    yield running
    stop.set()
    thread.join()
    for engine in running.engines:
        engine.socket.close()
    writer.close(10)
    server.close()
    directory.close()
    context.destroy(linger=0)


def test_an_engine_on_this_machine_gets_paths(running: Running) -> None:
    engine = running.local_engine()
    assert engine.put(1).stored and engine.put(2).stored
    wait_until(lambda: engine.has(1, 2) == 2)
    reply, frames = engine.get(1, 2, 3)
    assert reply.count == 2 and reply.paths is not None and frames == []
    assert [Path(path).read_bytes() for path in reply.paths] == [file_of(1), file_of(2)]


def test_an_engine_that_read_no_nonce_gets_bytes(running: Running) -> None:
    engine = running.engine()
    engine.put(1)
    wait_until(lambda: engine.has(1) == 1)
    reply, frames = engine.get(1, 2)
    assert reply.paths is None and frames == [file_of(1)]
    engine.send(wire.Located(nonce="guessed"))
    reply, frames = engine.get(1)
    assert reply.paths is None and frames == [file_of(1)]


def test_a_reply_in_bytes_is_bounded_and_the_rest_can_be_asked_for(running: Running) -> None:
    engine = running.engine()
    for number in range(5):
        engine.put(number, 10_000)
    wait_until(lambda: engine.has(*range(5)) == 5)
    reply, frames = engine.get(*range(5))
    assert reply.count == len(frames) == 2
    engine.put(9, 60_000)
    wait_until(lambda: engine.has(9) == 1)
    assert engine.get(9)[0].count == 1  # at least one, however large
    reads = engine.stats()
    assert (reads.reads_total, reads.misses_total) == (3, 0)


def test_a_namespace_is_cleared_and_others_stay(running: Running) -> None:
    engine = running.engine()
    other = "0b" * HASH_BYTES
    for number in range(3):
        assert engine.put(number).stored
    file = encode(hash_of(7), other, payload_of(7))
    reply, _ = engine.ask(wire.Put(ticket=1, namespace=other, hash=hash_of(7)), file)
    assert reply.stored
    wait_until(lambda: engine.stats().blocks == 4)
    engine.send(wire.Clear(namespace=NAMESPACE))
    wait_until(lambda: engine.stats().blocks == 1)
    assert engine.has(0, 1, 2) == 0
    found, _ = engine.ask(wire.Has(ticket=2, namespace=other, hashes=[hash_of(7)]))
    assert found.count == 1
    assert engine.put(0).stored
    wait_until(lambda: engine.has(0) == 1)


def test_two_engines_share_the_blocks_and_are_told_apart(running: Running) -> None:
    one, two = running.local_engine(), running.engine()
    one.put(1)
    wait_until(lambda: two.has(1) == 1)
    assert one.get(1)[0].paths is not None
    assert two.get(1)[0].paths is None
    assert one.stats().blocks == two.stats().blocks == 1


def test_a_persistent_put_is_answered_once_the_block_is_on_the_disk(persistent: Running) -> None:
    engine = persistent.engine()
    for number in range(5):
        assert engine.put(number).stored
        assert engine.has(number) == 1


def test_puts_on_a_slow_disk_do_not_delay_reads(persistent: Running, disk: FaultyDisk) -> None:
    writing, reading = persistent.engine(), persistent.local_engine()
    assert writing.put(1).stored
    disk.may_write.clear()
    for number in range(2, 600):  # more than the queue takes
        message = wire.Put(ticket=number, namespace=NAMESPACE, hash=hash_of(number))
        writing.send(message, file_of(number))
    wait_until(lambda: persistent.writer.drops > 0)
    for _ in range(20):
        assert reading.get(1)[0].count == 1
    disk.may_write.set()


def test_a_model_that_writes_much_leaves_another_its_part_of_the_queue(
    persistent: Running, disk: FaultyDisk
) -> None:
    busy, other, namespace = persistent.engine(), persistent.engine(), "0b" * HASH_BYTES
    disk.may_write.clear()
    for number in range(600):  # more than the queue takes
        message = wire.Put(ticket=number, namespace=NAMESPACE, hash=hash_of(number))
        busy.send(message, file_of(number))
    wait_until(lambda: persistent.writer.drops > 0)
    for number in range(20):
        message = wire.Put(ticket=number, namespace=namespace, hash=hash_of(number))
        other.send(message, encode(hash_of(number), namespace, payload_of(number)))
    wait_until(lambda: persistent.writer.drops >= 620 - 514)  # one is being written
    disk.may_write.set()
    replies = [other.receive()[0] for _ in range(20)]
    assert [reply.ticket for reply in replies if reply.stored] == list(range(20))


def test_look_ups_on_a_disk_that_hangs_are_misses_at_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "HANG_AFTER_S", 0.2)
    one, other = running.local_engine(), running.local_engine()
    one.put(1)
    wait_until(lambda: one.has(1) == 1)
    hangs, info = threading.Event(), running.directory.info

    def hanging(key: BlockKey) -> FileInfo | None:
        assert hangs.wait(30)
        return info(key)

    with monkeypatch.context() as patch:
        patch.setattr(running.directory, "info", hanging)
        one.send(wire.Get(ticket=5, namespace=NAMESPACE, hashes=[hash_of(1)]))
        time.sleep(0.4)
        assert other.get(1)[0].count == 0
        assert other.stats().blocks == 1
        hangs.set()
    assert one.receive()[0].count == 1
    wait_until(lambda: other.get(1)[0].count == 1)


def test_the_last_block_that_is_there_is_found(running: Running) -> None:
    engine = running.engine()
    assert engine.ask(wire.Locate())[0].finds_last
    engine.put(2)
    engine.put(4)
    wait_until(lambda: engine.has(2) + engine.has(4) == 2)

    def find(*numbers: int) -> int | None:
        hashes = [hash_of(number) for number in numbers]
        reply, _ = engine.ask(wire.FindLast(ticket=9, namespace=NAMESPACE, hashes=hashes))
        assert isinstance(reply, wire.FindLastReply) and reply.ticket == 9
        return reply.position

    assert find(1, 2, 3, 4, 5) == 3
    assert find(1, 2, 3) == 1
    assert find(1, 3) is None and find() is None


def test_a_persistent_put_of_an_invalid_block_is_answered_with_the_reason(
    persistent: Running,
) -> None:
    engine = persistent.engine()
    message = wire.Put(ticket=3, namespace=NAMESPACE, hash=hash_of(3))
    reply, _ = engine.ask(message, b"rubbish")
    assert not reply.stored and "not a block file" in reply.reason


def test_a_reported_block_is_verified_and_quarantined(running: Running) -> None:
    engine = running.local_engine()
    engine.put(1)
    engine.put(2)
    wait_until(lambda: engine.has(1, 2) == 2)
    path = Path((engine.get(1)[0].paths or [])[0])
    path.write_bytes(b"damaged")
    for number in (1, 2):
        engine.send(wire.Corrupt(namespace=NAMESPACE, hash=hash_of(number)))
    wait_until(lambda: engine.stats().corrupt_total == 1)
    assert not path.exists()
    assert engine.has(1) == 0 and engine.has(2) == 1


def test_rubbish_is_counted_and_dropped(running: Running) -> None:
    rng = random.Random(5)
    engine = running.engine()
    for _ in range(200):
        engine.socket.send_multipart(
            [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 5))]
        )
    header = wire.encode(wire.Has(ticket=1, namespace=NAMESPACE, hashes=[hash_of(1)]))[0]
    for position in range(len(header)):
        engine.socket.send(bytes(header[:position]))
    nonsense: list[tuple[wire.Message, list[bytes]]] = [
        (wire.Has(ticket=1, namespace="../..", hashes=[hash_of(1)]), []),
        (wire.Get(ticket=1, namespace=NAMESPACE, hashes=[b"short"]), []),
        (wire.Put(ticket=1, namespace=NAMESPACE, hash=hash_of(1)), []),
        (wire.Put(ticket=1, namespace=NAMESPACE, hash=hash_of(1)), [b"two", b"files"]),
        (wire.Put(ticket=1, namespace="/etc", hash=hash_of(1)), [b"x"]),
        (wire.Touch(namespace="..", hashes=[]), []),
        (wire.Corrupt(namespace="..", hash=hash_of(1)), []),
        (wire.Locate(protocol=99), []),
        (wire.Ping(router_id="lost its way"), []),
    ]
    for message, payload in nonsense:
        engine.send(message, *payload)
    other = running.engine()
    expected = 200 + len(header) + len(nonsense) - 1  # a touch of no blocks is valid
    wait_until(lambda: other.stats().dropped_messages_total == expected)
    assert other.put(1).stored


def test_an_engine_that_leaves_before_its_reply_does_no_harm(running: Running) -> None:
    for _ in range(20):
        engine = Engine(running.context, running.endpoint)
        engine.socket.set(zmq.LINGER, 1000)
        for number in range(20):
            engine.send(wire.Get(ticket=number, namespace=NAMESPACE, hashes=[hash_of(1)]))
        engine.socket.close()
    assert running.engine().stats().blocks == 0


def test_an_engine_that_never_reads_gets_no_more_blocks_and_others_do(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_UNSENT_BYTES", 2_000_000)
    deaf, other = running.engine(), running.engine()
    other.put(1, 100_000)
    wait_until(lambda: other.has(1) == 1)
    asked = 300
    for ticket in range(asked):
        deaf.send(wire.Get(ticket=ticket, namespace=NAMESPACE, hashes=[hash_of(1)]))
        # A thread of ZeroMQ's Python says what was sent, some time later.
        wait_until(lambda: other.get(1)[0].count == 1)
    served = [deaf.receive()[0].count for _ in range(asked)]
    assert served[0] == 1 and served.count(0) > 100
    wait_until(lambda: deaf.get(1)[0].count == 1)  # it reads again
