"""The kvstore from the view of a rank other than 0: its own files, and the questions of rank 0.

A thread owns the sockets. Fetched blocks are kept with a reference count, because two fetches may
want the same block: the plan that inserts it comes later, and so does its release.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from engine.io.store import rank_messages
from engine.io.store.block_fetch import Payload
from engine.io.store.client import StoreClient
from engine.io.store.rank_messages import Answer, FromRank, StoreState
from engine.parallel.errors import RankFailed
from engine.parallel.plans import StoredName, rank_name
from engine.plan import Payload as AnyPayload
from shared.exits import EXIT_FAILED
from shared.network.curve import EngineKeys

logger = logging.getLogger(__name__)

TICK_MS = 500


class RankStore(threading.Thread):
    """This rank's parts of blocks and states: a `RankBlocks`."""

    def __init__(
        self, channel: zmq.Socket[bytes], connect: Callable[[RankStore], StoreClient]
    ) -> None:
        """``channel`` is connected to rank 0's `GroupStore`. ``connect`` creates the kvstore
        client, which calls `wake` and `not_stored`."""
        super().__init__(name="store", daemon=True)
        self._channel = channel
        self._receiver, self._waker = socket.socketpair()
        for end in (self._receiver, self._waker):
            end.setblocking(False)
        self._lock = threading.Lock()
        self._kept: dict[StoredName, tuple[Payload, int]] = {}
        self._fetches: dict[int, list[StoredName]] = {}  # by ticket, until rank 0 knows the count
        self._refused: list[StoredName] = []
        self._num_stored = 0
        self._sent_state: StoreState | None = None
        self._stopping = False
        self._client = connect(self)

    # -- called from other threads ----------------------------------------------

    def fetched(self, name: StoredName) -> AnyPayload:
        with self._lock:
            if name not in self._kept:
                raise RankFailed("a plan inserts a block that was not fetched")
            return self._kept[name][0]

    def release(self, names: Sequence[StoredName]) -> None:
        with self._lock:
            for name in names:
                payload, uses = self._kept.pop(name)
                if uses > 1:
                    self._kept[name] = payload, uses - 1

    def store(self, name: StoredName, payload: AnyPayload) -> None:
        taken = self._client.store(name.hash, payload, name.is_state)
        with self._lock:
            self._num_stored += 1
            if not taken:
                self._refused.append(name)
        self.wake()

    def not_stored(self, names: list[tuple[bytes, bool]]) -> None:
        with self._lock:
            self._refused += [StoredName(*name) for name in names]

    def wake(self) -> None:
        try:
            self._waker.send(b"w")
        except BlockingIOError:
            pass  # enough wake-ups are pending

    def stop(self) -> None:
        """Stop the thread. An engine does not call this: it exits instead."""
        self._stopping = True
        self.wake()
        self.join()

    # -- the thread ---------------------------------------------------------------

    def run(self) -> None:
        try:
            self._run()
        except BaseException:
            logger.exception("the thread of the kvstore failed")
            os._exit(EXIT_FAILED)

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._channel, self._client.socket, self._receiver.fileno()):
            poller.register(each, zmq.POLLIN)
        while not self._stopping:
            events = dict(poller.poll(TICK_MS))
            if self._receiver.fileno() in events:
                self._receiver.recv(4096)
            if self._client.socket in events:
                self._client.on_readable()
            self._client.tick(time.monotonic())
            if self._channel in events:
                self._on_messages()
                self._client.tick(time.monotonic())
            self._tell_state()

    def _on_messages(self) -> None:
        while True:
            try:
                content = self._channel.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            match rank_messages.to_rank.decode(content):
                case rank_messages.CountBlocks(ticket=ticket, hashes=hashes):
                    self._client.count_blocks(hashes, partial(self._answer, ticket))
                case rank_messages.FindLastFile(
                    ticket=ticket, hashes=hashes, are_states=are_states
                ):
                    answer = partial(self._answer, ticket)
                    self._client.find_last(hashes, answer, are_states=are_states)
                case rank_messages.FetchFiles(ticket=ticket, hashes=hashes, are_states=True):
                    keep = partial(self._keep, ticket, [StoredName(hashes[0], True)])
                    self._client.get_state(hashes[0], keep)
                case rank_messages.FetchFiles(ticket=ticket, hashes=hashes):
                    keep = partial(self._keep, ticket, [StoredName(hash, False) for hash in hashes])
                    self._client.get_blocks(hashes, keep)
                case rank_messages.KeepFetched(ticket=ticket, count=count):
                    self.release(self._fetches.pop(ticket)[count:])
                case rank_messages.TouchFiles(blocks=blocks, states=states):
                    self._client.touch(blocks, states)
                case rank_messages.ClearFiles():
                    self._client.clear()

    def _keep(self, ticket: int, names: Sequence[StoredName], payloads: list[Payload]) -> None:
        found = list(names[: len(payloads)])
        with self._lock:
            for name, payload in zip(found, payloads, strict=True):
                kept, uses = self._kept.get(name, (payload, 0))
                self._kept[name] = kept, uses + 1
        self._fetches[ticket] = found
        self._answer(ticket, len(found))

    def _answer(self, ticket: int, value: int | None) -> None:
        self._send(Answer(ticket, value))

    def _tell_state(self) -> None:
        room = self._client.room()
        with self._lock:
            refused, self._refused = self._refused, []
            state = StoreState(
                is_ready=self._client.is_ready,
                files=room.files,
                size_bytes=room.size_bytes,
                under_way=self._client.num_stores_under_way,
                stored=self._num_stored,
                not_stored=refused,
            )
        if state != self._sent_state:
            self._sent_state = state
            self._send(state)

    def _send(self, message: FromRank) -> None:
        self._channel.send(rank_messages.encode(message))


def connect_channel(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    rank: int,
    keys: EngineKeys | None = None,
) -> zmq.Socket[bytes]:
    """Return the socket of `RankStore`, connected to rank 0's at ``address``."""
    channel = context.socket(zmq.DEALER)
    channel.set(zmq.LINGER, 0)
    channel.set(zmq.SNDHWM, 0)
    channel.set(zmq.RCVHWM, 0)
    channel.set(zmq.ROUTING_ID, rank_name(rank))
    if keys is not None:
        keys.protect(channel)
    channel.connect(address)
    return channel
