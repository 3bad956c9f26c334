from __future__ import annotations

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
from shared.hashing import HASH_BYTES
from tests.kvstore.blocks import NAMESPACE, file_of, hash_of, wait_until
from tests.kvstore.faulty_disk import FaultyDisk

OTHER = "0b" * HASH_BYTES
"""Another namespace."""


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

    def put(self, number: int, size: int = 1000, namespace: str = NAMESPACE) -> wire.PutReply:
        reply, _ = self.ask(*put_of(number, size, namespace))
        assert isinstance(reply, wire.PutReply) and reply.ticket == number
        return reply

    def keep(self, *numbers: int, size: int = 1000) -> None:
        """Put blocks, and wait until they are on the disk."""
        assert all(self.put(number, size).stored for number in numbers)
        wait_until(lambda: self.has(*numbers) == len(numbers))

    def get(self, *numbers: int) -> tuple[wire.GetReply, list[bytes]]:
        reply, frames = self.ask(get_of(77, *numbers))
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


def put_of(number: int, size: int = 1000, namespace: str = NAMESPACE) -> tuple[wire.Put, bytes]:
    message = wire.Put(ticket=number, namespace=namespace, hash=hash_of(number))
    return message, file_of(number, size, namespace)


def get_of(ticket: int, *numbers: int) -> wire.Get:
    hashes = [hash_of(number) for number in numbers]
    return wire.Get(ticket=ticket, namespace=NAMESPACE, hashes=hashes)


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


def test_an_engine_on_this_machine_gets_paths_and_another_gets_bytes(running: Running) -> None:
    local, other = running.local_engine(), running.engine()
    local.keep(1, 2)
    reply, frames = local.get(1, 2, 3)
    assert reply.count == 2 and reply.paths is not None and frames == []
    assert [Path(path).read_bytes() for path in reply.paths] == [file_of(1), file_of(2)]
    for _ in range(2):
        reply, frames = other.get(1, 3)
        assert reply.paths is None and frames == [file_of(1)]
        other.send(wire.Located(nonce="guessed"))
    assert local.stats().blocks == other.stats().blocks == 2


def test_a_reply_in_bytes_is_bounded_and_the_rest_can_be_asked_for(running: Running) -> None:
    engine = running.engine()
    engine.keep(*range(5), size=10_000)
    reply, frames = engine.get(*range(5))
    assert reply.count == len(frames) == 2
    engine.keep(9, size=60_000)
    assert engine.get(9)[0].count == 1  # at least one, however large
    reads = engine.stats()
    assert (reads.reads_total, reads.misses_total) == (3, 0)


def test_a_namespace_is_cleared_and_others_stay(running: Running) -> None:
    engine = running.engine()
    engine.keep(0, 1, 2)
    assert engine.put(7, namespace=OTHER).stored
    wait_until(lambda: engine.stats().blocks == 4)
    engine.send(wire.Clear(namespace=NAMESPACE))
    wait_until(lambda: engine.stats().blocks == 1)
    assert engine.has(0, 1, 2) == 0
    found, _ = engine.ask(wire.Has(ticket=2, namespace=OTHER, hashes=[hash_of(7)]))
    assert found.count == 1
    engine.keep(0)


def test_blocks_are_not_found_from_when_they_are_cleared(
    persistent: Running, disk: FaultyDisk
) -> None:
    local, other = persistent.local_engine(), persistent.engine()
    local.keep(1, 2)
    disk.may_write.clear()
    local.send(*put_of(9, namespace=OTHER))
    assert local.has(9) == 0
    wait_until(lambda: not len(persistent.writer._puts))  # the writer is busy with it
    local.send(wire.Clear(namespace=NAMESPACE))
    assert local.get(1)[0].count == local.has(1) == 0
    assert other.get(1)[0].count == 0
    assert local.stats().is_clearing
    local.send(*put_of(3))
    disk.may_write.set()
    wait_until(lambda: local.has(3) == 1)
    assert not local.stats().is_clearing
    assert local.has(1) == local.has(2) == 0


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
        writing.send(*put_of(number))
    wait_until(lambda: persistent.writer.drops > 0)
    for _ in range(20):
        assert reading.get(1)[0].count == 1
    disk.may_write.set()


def test_a_model_that_writes_much_leaves_another_its_part_of_the_queue(
    persistent: Running, disk: FaultyDisk
) -> None:
    busy, other = persistent.engine(), persistent.engine()
    disk.may_write.clear()
    for number in range(600):  # more than the queue takes
        busy.send(*put_of(number))
    wait_until(lambda: persistent.writer.drops > 0)
    for number in range(20):
        other.send(*put_of(number, namespace=OTHER))
    wait_until(lambda: persistent.writer.drops >= 620 - 514)  # one is being written
    disk.may_write.set()
    replies = [other.receive()[0] for _ in range(20)]
    assert [reply.ticket for reply in replies if reply.stored] == list(range(20))
    assert persistent.writer.drops <= 620 - 512, "the other one lost no more than that"


def test_look_ups_on_a_disk_that_hangs_are_misses_at_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "HANG_AFTER_S", 0.2)
    one, other = running.local_engine(), running.local_engine()
    one.keep(1)
    hangs, info = threading.Event(), running.directory.info

    def hanging(key: BlockKey) -> FileInfo | None:
        assert hangs.wait(30)
        return info(key)

    with monkeypatch.context() as patch:
        patch.setattr(running.directory, "info", hanging)
        one.send(get_of(5, 1))
        time.sleep(0.4)
        assert other.get(1)[0].count == 0
        assert other.stats().blocks == 1
        hangs.set()
    assert one.receive()[0].count == 1
    wait_until(lambda: other.get(1)[0].count == 1)


def test_the_last_block_that_is_there_is_found(running: Running) -> None:
    engine = running.engine()
    assert engine.ask(wire.Locate())[0].finds_last
    engine.keep(2)
    engine.keep(4)

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
    message, _ = put_of(3)
    reply, _ = engine.ask(message, b"rubbish")
    assert not reply.stored and "not a block file" in reply.reason


def test_a_reported_block_is_verified_and_quarantined(running: Running) -> None:
    engine = running.local_engine()
    engine.keep(1, 2)
    path = Path((engine.get(1)[0].paths or [])[0])
    path.write_bytes(b"damaged")
    for number in (1, 2):
        engine.send(wire.Corrupt(namespace=NAMESPACE, hash=hash_of(number)))
    wait_until(lambda: engine.stats().corrupt_total == 1)
    assert not path.exists()
    assert engine.has(1) == 0 and engine.has(2) == 1


def test_an_engine_that_leaves_before_its_reply_does_no_harm(running: Running) -> None:
    for _ in range(20):
        engine = Engine(running.context, running.endpoint)
        engine.socket.set(zmq.LINGER, 1000)
        for number in range(20):
            engine.send(get_of(number, 1))
        engine.socket.close()
    assert running.engine().stats().blocks == 0


def test_an_engine_that_never_reads_gets_no_more_blocks_and_others_do(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_UNSENT_BYTES", 2_000_000)
    deaf, other = running.engine(), running.engine()
    other.keep(1, size=100_000)
    asked = 300
    for ticket in range(asked):
        deaf.send(get_of(ticket, 1))
        # A thread of ZeroMQ's Python says what was sent, some time later.
        wait_until(lambda: other.get(1)[0].count == 1)
    served = [deaf.receive()[0].count for _ in range(asked)]
    assert served[0] == 1 and served.count(0) > 100
    wait_until(lambda: deaf.get(1)[0].count == 1)  # it reads again
