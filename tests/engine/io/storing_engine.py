"""A client of the kvstore with a thread of its own, as in an engine, and kvstores for it."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import zmq

from engine.io.store.block_fetch import FileKind, Payload
from engine.io.store.client import StoreClient
from engine.plan import FoundPart, FoundState, PartSearch, StateSearch
from shared.hashing import HASH_BYTES
from tests.kvstore.blocks import hash_of, payload_of, wait_until
from tests.kvstore.process import Process

TIMEOUT_S = 1.0
_NAMESPACES = count()


@contextmanager
def running_kvstore(*flags: str) -> Iterator[Process]:
    """Yield a kvstore with these flags."""
    with tempfile.TemporaryDirectory(prefix="mlms-", dir="/tmp") as directory:
        process = Process(Path(directory) / "blocks", Path(directory) / "kvstore", *flags)
        try:
            yield process.start()
        finally:
            process.end()


def new_namespace() -> str:
    """Return a namespace that no kvstore has: tests may share one."""
    return next(_NAMESPACES).to_bytes(HASH_BYTES, "big").hex()


class StoringEngine:
    kvstore: Process
    """The process behind it, in tests that stop it or touch its files."""

    def __init__(self, endpoint: str) -> None:
        self.blocks, self.states = FileKind(new_namespace()), FileKind(new_namespace())
        self.answers: dict[int, list[list[Payload]]] = {}
        self._found: dict[int, FoundState | FoundPart | None] = {}
        self.not_stored: list[tuple[bytes, bool]] = []
        self._tickets = iter(range(1_000_000))
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._stop = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pool = ThreadPoolExecutor(3)
        self.client = StoreClient(
            self._context,
            endpoint,
            self.blocks,
            self._pool,
            self._on_fetched,
            self.wake,
            TIMEOUT_S,
            states=self.states,
            on_stores_answered=self.not_stored.extend,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wake(self) -> None:
        try:
            self._wake.send(b"\0")
        except BlockingIOError:
            pass  # awake already

    def fetch(self, *numbers: int) -> list[Payload]:
        """Fetch blocks and wait for the one answer."""
        ticket = next(self._tickets)
        self.client.fetch(ticket, [hash_of(number) for number in numbers])
        wait_until(lambda: ticket in self.answers)
        return self.answers[ticket][0]

    def fetch_prefix(
        self, *numbers: int, ready: int = 0, in_ram: tuple[int, ...] = ()
    ) -> tuple[int, int]:
        """Fetch blocks, of which the first ``ready`` are there, with the state they end with.
        Return the number of blocks that came, and the count of the state, 0 for none."""
        ticket = next(self._tickets)
        hashes = [hash_of(number) for number in numbers]
        self.client.fetch(ticket, hashes[ready:], StateSearch(hashes, ready, in_ram))
        wait_until(lambda: ticket in self.answers)
        payloads, state = self.answers[ticket][0], self._found[ticket]
        for number, payload in zip(numbers[ready:], payloads, strict=False):
            assert payload == payload_of(number)
        if state is None:
            return len(payloads), 0
        assert isinstance(state, FoundState)
        assert state.payload == payload_of(1000 + numbers[state.end - 1])
        return len(payloads), state.end

    def fetch_part(self, *numbers: int, page_blocks: int) -> tuple[int, int]:
        """Fetch the pages that end the given blocks, and a part of the one after them. Return the
        number of pages, and of blocks of the part, that came."""
        ticket = next(self._tickets)
        hashes = [hash_of(number) for number in numbers]
        search = PartSearch(hashes, page_blocks)
        self.client.fetch(ticket, hashes[page_blocks - 1 :: page_blocks], search)
        wait_until(lambda: ticket in self.answers)
        payloads, part = self.answers[ticket][0], self._found[ticket]
        blocks = part.blocks if isinstance(part, FoundPart) else 0
        ends = [*range(page_blocks, len(payloads) * page_blocks + 1, page_blocks)]
        for end, payload in zip(ends, payloads, strict=True):
            assert payload == payload_of(numbers[end - 1])
        if part is not None:
            last = len(payloads) * page_blocks + blocks
            assert part.payload == payload_of(numbers[last - 1])
        return len(payloads), blocks

    def store_state(self, number: int) -> None:
        writes = self.client.stats.writes + 1
        assert self.client.store(hash_of(number), payload_of(1000 + number), is_state=True)
        wait_until(lambda: self.client.stats.writes == writes)

    def holds(self, *numbers: int, size: int = 1000) -> bool:
        """Return whether a fetch gives all of these blocks. Those it gives must be unchanged."""
        payloads = self.fetch(*numbers)
        for number, payload in zip(numbers, payloads, strict=False):
            assert payload == payload_of(number, size), f"block {number} differs"
        return len(payloads) == len(numbers)

    def store(self, *numbers: int, size: int = 1000) -> None:
        """Wait for the kvstore and store blocks; return when all are stored."""
        wait_until(lambda: self.client.is_ready)
        writes = self.client.stats.writes + len(numbers)
        for number in numbers:
            assert self.client.store(hash_of(number), payload_of(number, size))
        wait_until(lambda: self.client.stats.writes == writes)

    def keep(self, *numbers: int, size: int = 1000) -> None:
        """Store blocks; return when they can be fetched."""
        self.store(*numbers, size=size)
        wait_until(lambda: self.holds(*numbers, size=size))

    def file_path(self, number: int) -> Path:
        return self.kvstore.file_path(number, self.blocks.namespace)

    def close(self) -> None:
        self._stop = True
        self.wake()
        self._thread.join()
        self._pool.shutdown()
        self._context.destroy(linger=0)
        self._woken.close()
        self._wake.close()
        assert all(len(answers) == 1 for answers in self.answers.values())

    def _on_fetched(
        self, ticket: int, payloads: list[Payload], end: FoundState | FoundPart | None
    ) -> None:
        self._found[ticket] = end
        self.answers.setdefault(ticket, []).append(payloads)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.client.socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll(100))
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            if self.client.socket in ready:
                self.client.on_readable()
            self.client.tick(time.monotonic())
        self.client.close()
